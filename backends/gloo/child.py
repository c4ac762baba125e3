"""The operating system's process of a side process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Child"]

_PROGRAM = Path(__file__).with_name("child_main.py")


class Child:
    """Starts, kills and reaps the process, and keeps its output."""

    def __init__(self) -> None:
        # A file in memory, not a pipe: it never fills up, and no thread has to read.
        self._output = os.memfd_create("rankscope-output", os.MFD_CLOEXEC)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        #: Whether `kill` was called.
        self.killed = False

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` if it has not been started."""
        return None if self._process is None else self._process.pid

    def start(self, arguments: Sequence[object], descriptors: Sequence[int]) -> None:
        """Start it, unless it was killed already; raises `OSError`.

        The kernel kills it when the calling *thread* ends.
        """
        with self._lock:
            if self.killed:
                return
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), *map(str, arguments)],
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
            self.killed = True
            if self._process is not None:
                self._process.kill()

    def wait(self) -> tuple[int, str]:
        """Wait for its end; return its exit code and how it ended, in words."""
        if self._process is None:
            return 0, "never ran"
        code = self._process.wait()
        name = f"(pid {self._process.pid})"
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return code, f"{name} was killed by {signal.Signals(-code).name}"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        size = os.fstat(self._output).st_size
        tail = os.pread(self._output, 4096, max(0, size - 4096))
        lines = [line for line in tail.decode(errors="replace").split("\n") if line]
        return code, f"{name} ended with {how}: {' | '.join(lines[-6:]) or 'no output'}"

    def close(self) -> None:
        """Close the file of a process that will never be started, or has ended."""
        os.close(self._output)
