"""The ranks of one contender, started once and asked in turns."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["ContenderFailed", "Ranks"]

WORKER = Path(__file__).with_name("worker.py")


class ContenderFailed(RuntimeError):
    """A rank died, raised or did not answer in time; the text says which and why."""


class Ranks:
    """`size` processes that run one contender; idle ones block on their input."""

    def __init__(self, name: str, size: int, python: str = sys.executable) -> None:
        self.name = name
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(size):
                place = (str(rank), str(size), self._folder.name)
                with open(self._log(rank), "w", encoding="utf-8") as log:
                    process = subprocess.Popen(
                        # -I: the modules beside the worker are not importable
                        # there, so none can stand in a library's way.
                        [python, "-I", WORKER, name, *place],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        bufsize=1,
                        start_new_session=True,
                        env=os.environ | {"RANKSCOPE_KEY": self._folder.name},
                    )
                self._processes.append(process)
            self._answers(60)
        except BaseException:
            self.close()
            raise

    def _log(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"log-{rank}")

    def ask(self, timeout: float = 120, **request: Any) -> list[dict[str, Any]]:
        """Send `request` to every rank; return their answers, by rank."""
        line = json.dumps(request) + "\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                self._fail(rank, "is gone")
        return self._answers(timeout)

    def times(self, iterations: int, variant: str = "") -> list[float]:
        """Run `iterations` all_reduces; seconds of each, the mean over the ranks."""
        return self.costs(iterations, variant)[0]

    def costs(self, iterations: int, variant: str) -> tuple[list[float], float]:
        """As `times`, and the seconds of CPU that one took, the mean over the ranks.

        CPU of the rank's process and its children, all threads.
        """
        answers = self.ask(do="run", iterations=iterations, variant=variant)
        each = zip(*(answer["times"] for answer in answers), strict=True)
        times = [sum(ranks) / len(ranks) / 1e9 for ranks in each]
        used = sum(answer["cpu"] for answer in answers) / len(answers) / 1e9
        return times, used / iterations

    def prepare(self, nbytes: int, variant: str = "") -> None:
        """Allocate on every rank and check one result."""
        self.ask(do="prepare", bytes=nbytes, variant=variant)

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.size:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    rank = next(r for r in range(self.size) if r not in answers)
                    self._fail(rank, f"did not answer in {timeout:g} s")
                for key, _ in ready:
                    # An answer is one short line, written at once.
                    line = self._processes[key.data].stdout.readline()
                    if not line:
                        self._fail(key.data, "died")
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.size)]

    def _fail(self, rank: int, what: str) -> None:
        log = Path(self._log(rank)).read_text(encoding="utf-8", errors="replace")
        last = log.strip().splitlines()[-1:] or ["it said nothing"]
        raise ContenderFailed(f"{self.name}: rank {rank} {what}: {last[0]}")

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        deadline = time.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()
