"""Scripts under a real torchrun, for the tests that attach to their jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from rankscope.backends.observe.verdicts import Verdict
from rankscope.engines import Job, RankStatus

__all__ = ["DEADLINE", "Torchrun", "until"]

#: Seconds after which what is waited for fails the test.
DEADLINE = 120.0

_ATTACH = re.compile(r"%dist_attach (?P<address>\S+)(?: --key (?P<key>\w+))?")

#: What every script begins with: ``wait("name")`` returns once the test calls
#: `Torchrun.let`, and `note` leaves a text for the test.
_PREAMBLE = """
import os, sys, time
from pathlib import Path
folder = Path(os.environ["TEST_FOLDER"])
def wait(name):
    while not (folder / name).exists():
        time.sleep(0.01)
def note(name, text=""):
    (folder / f"{name}.new").write_text(text)
    (folder / f"{name}.new").rename(folder / name)
"""

WATCH = "import rankscope.torch\nrankscope.torch.watch()\n"

_INIT = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""

#: The end of a script whose error is wanted of every rank: torchrun ends the others as
#: soon as one has failed.
RUN = """
try:
    train()
except Exception as error:
    sys.last_value = error
    sys.stderr = open(folder / f"error.{rank}.new", "w")
    sys.excepthook(*sys.exc_info())
    sys.stderr.close()
    (folder / f"error.{rank}.new").rename(folder / f"error.{rank}")
    for one in range(world_size):
        wait(f"error.{one}")
    os._exit(7)
"""


class Torchrun:
    """`count` ranks of a script; ``with Torchrun(3, code, folder) as script``."""

    def __init__(
        self,
        count: int,
        code: str,
        folder: Path,
        *,
        begin: str = WATCH,
        module: str | None = None,
        options: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
        env: Mapping[str, str] = {},
    ) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(_PREAMBLE + begin + _INIT + textwrap.dedent(code))
        self._output = folder / "output"
        run = [] if module is None else ["-m", module, *options]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *("--standalone", "--nproc-per-node", str(count)),
                    *(*run, str(self.script), *arguments),
                ],
                env={**os.environ, **env, "TEST_FOLDER": str(folder)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            # It ends the ranks.
            self.process.terminate()
        self.process.wait(DEADLINE)

    @property
    def output(self) -> str:
        """What torchrun and the ranks have printed so far."""
        return self._output.read_text()

    def let(self, name: str) -> None:
        """Let the ranks go on that wait for `name`."""
        (self.folder / name).touch()

    def read(self, name: str) -> str:
        """Return the text that a rank has left, once it is there."""
        until(lambda: (self.folder / name).exists(), self)
        return (self.folder / name).read_text()

    def printed(self) -> tuple[str, str | None]:
        """Return address and key, as rank 0 prints them."""
        until(lambda: _ATTACH.search(self.output) is not None, self)
        found = _ATTACH.search(self.output)
        assert found is not None
        return found["address"], found["key"]

    def attach(self) -> Job:
        """Attach as the printed line says."""
        return Job.attach(*self.printed(), attach_timeout=DEADLINE)

    def finish(self) -> int:
        """Wait for the end of the script; return torchrun's exit status."""
        return self.process.wait(DEADLINE)


def until(condition: Callable[[], bool], script: Torchrun | None = None) -> None:
    """Wait until `condition` holds; a script that ends meanwhile fails the test."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        ended = script is not None and script.process.poll() is not None
        assert not ended or condition(), script.output if script else ""
        assert time.monotonic() < deadline, script.output if script else "never"
        time.sleep(0.02)


def waiting(job: Job, *ranks: int) -> bool:
    """Whether each of `ranks` has an op in flight in a group."""
    found: list[RankStatus] = [job.status(fresh=True).ranks[rank] for rank in ranks]
    return all(any(one.oldest for one in rank.groups) for rank in found)


def verdict(job: Job) -> Verdict:
    """Return the one verdict, once there is one."""
    found: list[Verdict] = []

    def look() -> bool:
        found[:] = job.diagnose()
        return bool(found)

    until(look)
    assert len(found) == 1, found
    return found[0]
