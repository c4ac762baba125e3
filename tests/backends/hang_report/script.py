"""Processes of a plain script, what each of them wrote, and their report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from rankscope.backends.conformance.ranks import reserve_port
from rankscope.backends.conformance.waiting import until
from rankscope.backends.post_mortem.report import examine

__all__ = ["DEADLINE", "SAID", "Script"]

DEADLINE = 60.0

_PREAMBLE = """
import os, signal, sys, time
import numpy as np
import rankscope.backends as dist
rank = int(os.environ["RANK"])
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.01)
x = np.ones(4)
"""
SAID = re.compile(r"^rankscope: .*; the report is (\S+)$", re.MULTILINE)


class Script:
    """`count` processes of a script, in `folder`, with nothing but the environment.

    With `apart`, each finds no other one where the ranks of a host meet.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        code: str,
        after: float,
        *,
        apart: bool = False,
    ) -> None:
        self.folder = folder
        self.reports = folder / "reports"
        self.path = folder / "train.py"
        self.path.write_text(_PREAMBLE + textwrap.dedent(code))
        # Where the ranks of a host meet.
        places = [folder / "tmp" / (str(one) if apart else "") for one in range(count)]
        for place in places:
            place.mkdir(parents=True, exist_ok=True)
        self._port = reserve_port()
        env = {
            **os.environ,
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.getsockname()[1]),
            "RANKSCOPE_REPORT": str(self.reports),
            "RANKSCOPE_REPORT_AFTER": str(after),
        }
        self._logs = [folder / f"log.{rank}" for rank in range(count)]
        self.ranks = []
        for rank, log in enumerate(self._logs):
            with log.open("wb") as output:
                self.ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(self.path)],
                        env={**env, "RANK": str(rank), "TMPDIR": str(places[rank])},
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def close(self) -> None:
        for one in self.ranks:
            one.kill()
            one.wait()
        self._port.close()

    @property
    def output(self) -> str:
        return "".join(self.log(rank) for rank in range(len(self.ranks)))

    def log(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")

    def let(self, name: str) -> None:
        (self.folder / name).touch()

    def finish(self) -> list[int]:
        """Wait for the ends of all ranks; return their exit codes."""
        codes = [one.wait(DEADLINE) for one in self.ranks]
        # They leave nothing where they met, but for one that was killed.
        left = (self.folder / "tmp").glob("**/rankscope-*")
        assert -signal.SIGKILL in codes or not [*left]
        return codes

    def line(self, comment: str) -> str:
        lines = self.path.read_text().splitlines()
        (number,) = (i for i, one in enumerate(lines, 1) if one.endswith(comment))
        return f"train.py:{number}"

    def report(self) -> dict[str, Any]:
        """Return the verdict, once a rank has said it; as a terminal reads it."""
        until(lambda: SAID.search(self.output) is not None, DEADLINE)
        (folder,) = self.reports.iterdir()
        assert len(SAID.findall(self.output)) == 1
        told = json.loads((folder / "verdict.json").read_text())
        (verdict,) = told["verdicts"]
        assert verdict["text"] in self.output
        assert [str(one) for one in examine([str(folder)]).verdicts] == [
            verdict["text"]
        ]
        assert (folder / "report.html").stat().st_size
        assert told["world_size"] == len(self.ranks)
        return verdict
