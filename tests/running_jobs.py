"""Programs whose ranks wait, and what `rankscope diagnose` prints of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from rankscope.backends.attach.py_spy import PySpyError, dump, find_py_spy
from rankscope.backends.conformance.waiting import until

__all__ = ["DEADLINE", "Program", "block_of", "line_of", "may_read", "refused"]

#: Seconds after which what is waited for fails the test.
DEADLINE = 60.0

_PREAMBLE = """
import os, sys, time
def note(name):
    open(os.path.join(os.environ["TEST_FOLDER"], name), "w").close()
def wait(name):
    while not os.path.exists(os.path.join(os.environ["TEST_FOLDER"], name)):
        time.sleep(0.01)
"""


class Program:
    """A command that runs a script of Python, and the files by which it is led."""

    def __init__(
        self,
        folder: Path,
        code: str,
        *command: str,
        environment: Mapping[str, str] = {},
    ) -> None:
        self.folder = folder
        self.script = folder / "program.py"
        self.script.write_text(_PREAMBLE + textwrap.dedent(code))
        # The text of a line is shown if the file is older than the process: the clock
        # of a file system is coarse, and that of a process counts in 10 ms.
        status = self.script.stat()
        os.utime(self.script, (status.st_atime, status.st_mtime - 60))
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*(command or (sys.executable,)), str(self.script)],
                env={**os.environ, **environment, "TEST_FOLDER": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(DEADLINE)

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(errors="replace")

    def wait_for(self, *notes: str) -> None:
        """Wait until its processes have left `notes`."""

        def are_there() -> bool:
            assert self.process.poll() is None, self.output
            return all((self.folder / note).exists() for note in notes)

        until(are_there, DEADLINE)

    def finish(self, name: str) -> str:
        """Let it go on, wait for its end without an error, and return its output."""
        (self.folder / name).touch()
        assert self.process.wait(DEADLINE) == 0, self.output
        return self.output


def line_of(program: Program, text: str) -> str:
    """Return ``program.py:7``: the line of its script with `text`."""
    lines = program.script.read_text().splitlines()
    (number,) = (place for place, line in enumerate(lines, 1) if text in line)
    return f"{program.script.name}:{number}"


def block_of(printed: str, pid: int) -> list[str]:
    """Return the lines that were printed of the job whose launcher is `pid`."""
    lines = printed.splitlines()
    begins = re.compile(rf"\S+ {pid}\b")
    (place,) = (i for i, line in enumerate(lines) if begins.match(line))
    end = place + 1
    while end < len(lines) and lines[end].startswith("  "):
        end += 1
    return lines[place:end]


def may_read(pid: int) -> bool:
    """Return whether this system lets the tests read another process."""
    problem = ""
    try:
        dump(find_py_spy(), pid)
    except PySpyError as error:
        problem = str(error)
    assert not problem or refused(problem), problem
    return not problem


def refused(text: str) -> bool:
    """Return whether a text says what to set where processes may not be read."""
    return "ptrace_scope" in text or "SYS_PTRACE" in text
