"""The process that ends a cluster whose owner was killed.

`OrphanReaper` starts this file by its path with the options ``-I -S``, so it imports
the standard library only and is ready within milliseconds. Messages arrive on stdin
as one JSON object per line:

``{"stop": [executable, cluster file]}``
    Let ipyparallel stop what runs on other machines.
``{"pids": [[pid, start time], ...], "files": [path, ...]}``
    More processes of this machine to end, and files to remove.
``{"release": true}``
    The owner ends the cluster itself, or the cluster has to go on.

At the end of stdin, or when the owner's process ends, everything that was named is
ended, unless a release came first.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

__all__ = ["process_start_time", "remove"]

#: Seconds between SIGTERM and SIGKILL.
GRACE = 2.0
#: Seconds that ipyparallel gets to stop what runs on other machines.
STOP_TIMEOUT = 15.0


def process_start_time(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since the system's boot.

    The pid together with the start time identifies a process also after the pid was
    given to another one. ``None`` for a pid without a process, and for a zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name, in parentheses, may contain anything: split after its end.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def remove(path: str) -> None:
    """Remove a file, or a folder with all that it contains, if it exists."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


class _Reaper:
    def __init__(self, owner: int) -> None:
        self.owner = owner
        #: pid -> start time.
        self.processes: dict[int, int] = {}
        self.files: list[str] = []
        self.stop_command: list[str] | None = None
        self.released = False

    def wait_for_end_of_owner(self) -> None:
        """Read messages until stdin or the owner's process ends."""
        buffer = b""
        poll = select.poll()
        poll.register(0, select.POLLIN | select.POLLHUP)
        try:
            # In addition to stdin: a child that the owner forked may hold the
            # other end of the pipe open.
            owner = os.pidfd_open(self.owner)
        except OSError:
            owner = -1
        else:
            poll.register(owner, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if 0 in ready:
                chunk = os.read(0, 65536)
                if not chunk:
                    return
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    self.receive(json.loads(line))
            elif owner in ready:
                return

    def receive(self, message: dict[str, Any]) -> None:
        self.processes.update(message.get("pids", ()))
        self.files += message.get("files", ())
        self.stop_command = message.get("stop", self.stop_command)
        self.released = self.released or bool(message.get("release"))

    def end_all(self) -> None:
        """Send SIGTERM, then SIGKILL, to the processes and their descendants."""
        if self.stop_command is not None:
            self.stop_on_other_machines(*self.stop_command)
        self.processes.update(_descendants(self.processes))
        deadline = time.monotonic() + GRACE
        self.signal_all(signal.SIGTERM)
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.processes.update(_descendants(self.processes))
        self.signal_all(signal.SIGKILL)
        for path in self.files:
            remove(path)

    def stop_on_other_machines(self, executable: str, cluster_file: str) -> None:
        code = (
            "import sys; from ipyparallel import Cluster; "
            "Cluster.from_file(sys.argv[1]).stop_cluster_sync()"
        )
        try:
            subprocess.run(
                [executable, "-c", code, cluster_file],
                timeout=STOP_TIMEOUT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            # The processes of this machine are ended below in any case.
            pass

    def living(self) -> list[int]:
        return [
            pid
            for pid, started in self.processes.items()
            if process_start_time(pid) == started
        ]

    def signal_all(self, signum: int) -> None:
        for pid in self.living():
            try:
                os.kill(pid, signum)
            except OSError:
                pass


def _descendants(processes: dict[int, int]) -> dict[int, int]:
    """Return the descendants of `processes`, at any depth, with their start times."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(name))
    found: dict[int, int] = {}
    pending = [
        pid for pid, started in processes.items() if process_start_time(pid) == started
    ]
    while pending:
        for child in children.get(pending.pop(), ()):
            started = process_start_time(child)
            if started is not None and child not in found and child not in processes:
                found[child] = started
                pending.append(child)
    return found


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    reaper = _Reaper(int(sys.argv[1]))
    reaper.wait_for_end_of_owner()
    if not reaper.released:
        reaper.end_all()


if __name__ == "__main__":
    main()
