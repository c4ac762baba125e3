"""The owner's handle of the process that ends a cluster whose owner was killed.

ipyparallel's controller and engines run on when their owner is killed, since a
killed process runs no clean-up. The reaper is a process of its own: it reads from a
pipe whose other end only the owner holds, and ends the cluster at end of file. Its
code is in `orphan_reaper_main`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Any

from . import orphan_reaper_main
from .orphan_reaper_main import living, process_start_time

__all__ = ["OrphanReaper"]

#: Seconds that the process gets to end after its release.
RELEASE_TIMEOUT = 2.0

_STOP = (
    "import sys; from ipyparallel import Cluster; "
    "Cluster.from_file(sys.argv[1]).stop_cluster_sync()"
)


class OrphanReaper:
    """Starts the reaper's process and sends the processes to end to it.

    Usable from any thread. The process may be killed, as by the kernel where memory
    is short: the next `watch` then starts another one, which gets everything that was
    named so far. `stop_file` is the cluster file by which ipyparallel stops what runs
    on other machines; ``None`` if everything runs on this machine.
    """

    def __init__(self, stop_file: str | None = None) -> None:
        #: The command that ends what runs elsewhere; may change until `release`.
        self.stop: list[str] = []
        if stop_file is not None:
            self.stop = [sys.executable, "-c", _STOP, stop_file]
        # pid -> start time.
        self._processes: dict[int, int] = {}
        self._files: dict[str, None] = {}
        self._lock = threading.Lock()
        self._released = False
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The pid of the reaper's process."""
        return self._process.pid

    def watch(self, pids: Iterable[int], files: Iterable[str]) -> None:
        """Add processes of this machine to end, and files to remove."""
        started = {pid: process_start_time(pid) for pid in pids}
        with self._lock:
            if self._released:
                return
            self._processes.update(
                (pid, when) for pid, when in started.items() if when is not None
            )
            self._files.update(dict.fromkeys(files))
            try:
                self._send(self._process, self._watched())
            except BrokenPipeError:
                self._reap()
                self._process = self._start()

    def release(self) -> None:
        """End the reaper's process and leave everything that it watches running."""
        with self._lock:
            self._released = True
            # A process that was killed needs no release.
            with contextlib.suppress(BrokenPipeError):
                self._send(self._process, {"pids": [], "files": [], "stop": []})
            self._reap()

    def _start(self) -> subprocess.Popen[bytes]:
        # -I -S: without site-packages and the user's environment.
        command = [sys.executable, "-I", "-S", orphan_reaper_main.__file__]
        process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Signals to the notebook's process group, and the hang-up of its
            # terminal, must not end the reaper.
            start_new_session=True,
            cwd="/",
        )
        # A process that is killed already is replaced by the next `watch`.
        with contextlib.suppress(BrokenPipeError):
            self._send(process, self._watched())
        return process

    def _watched(self) -> dict[str, Any]:
        self._processes = living(self._processes)
        return {
            "pids": [*self._processes.items()],
            "files": [*self._files],
            "stop": self.stop,
        }

    def _send(self, process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()

    def _reap(self) -> None:
        """Close the pipe and collect the exit status of the process."""
        assert self._process.stdin is not None
        # Written and not flushed messages are lost with the process.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(RELEASE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
