"""The operating system's process of a side process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Child", "side_command"]

# Neither site-packages nor this package's __init__ are imported: that would
# take ten times as long as the rest of the start.
_BOOTSTRAP = """\
import importlib, sys, types
package = types.ModuleType("rankscope_side")
package.__path__ = [sys.argv.pop()]
sys.modules["rankscope_side"] = package
importlib.import_module("rankscope_side." + sys.argv.pop()).main()
"""


def side_command(module: str, *arguments: object) -> list[str]:
    """Return the command that runs ``main()`` of a module of `side` in a process."""
    return [
        sys.executable,
        *("-I", "-S", "-c", _BOOTSTRAP),
        *map(str, arguments),
        module,
        str(Path(__file__).parent / "side"),
    ]


class Child:
    """Starts, kills and reaps the process, and keeps its output."""

    def __init__(self, name: str) -> None:
        self._name = name
        # A file in memory, not a pipe: it never fills up, and no thread has to read.
        self._output = os.memfd_create("rankscope-output", os.MFD_CLOEXEC)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` if it has not been started."""
        return None if self._process is None else self._process.pid

    @property
    def killed(self) -> bool:
        """Whether `kill` was called."""
        return self._killed

    def start(self, arguments: Sequence[object], descriptors: Sequence[int]) -> None:
        """Start it, unless it was killed already; raises `OSError`.

        The kernel kills it when the calling *thread* ends: call this on one
        that lives long enough.
        """
        with self._lock:
            if self._killed:
                return
            self._process = subprocess.Popen(
                side_command("main", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=descriptors,
                # Ctrl-C in a terminal signals the process group of the rank.
                start_new_session=True,
            )

    def kill(self) -> None:
        """Send SIGKILL, from any thread; a process not yet started never starts."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def reap(self) -> str:
        """Wait for its end; return how it ended, with the last lines of its output."""
        try:
            if self._process is None:
                return f"{self._name} never ran"
            code = self._process.wait()
            name = f"{self._name} (pid {self._process.pid})"
            if code in (-signal.SIGKILL, -signal.SIGTERM):
                return f"{name} was killed by {signal.Signals(-code).name}"
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            size = os.fstat(self._output).st_size
            tail = os.pread(self._output, 4096, max(0, size - 4096))
            lines = [line for line in tail.decode(errors="replace").split("\n") if line]
            return f"{name} ended with {how}: {' | '.join(lines[-6:]) or 'no output'}"
        finally:
            self.close()

    def close(self) -> None:
        """Close the file of a process that will never be started, or has ended."""
        os.close(self._output)
