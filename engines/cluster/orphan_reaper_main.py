"""The process that ends a cluster whose owner was killed.

`OrphanReaper` starts this file by its path with the options ``-I -S``, so it imports
the standard library only and is ready within milliseconds. A message on stdin is one
JSON object in a line, and takes the place of the one before:

``pids``
    The processes of this machine to end: ``[[pid, start time], ...]``.
``files``
    The files and folders to remove.
``stop``
    The command by which ipyparallel, or Slurm, stops what runs on other machines;
    empty: nothing.

At the end of stdin, or when the owner's process ends, everything is ended that the last
message names.
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
from collections.abc import Mapping, Sequence

__all__ = ["living", "process_start_time", "remove"]

#: Seconds between SIGTERM and SIGKILL.
GRACE = 2.0
#: Seconds that the command gets to stop what runs on other machines.
STOP_TIMEOUT = 15.0


def process_start_time(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since the system's boot.

    The pid together with the start time identifies a process also after the pid was
    given to another one. ``None`` for a pid without a process, and for a zombie.
    """
    fields = _stat(pid)
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def living(processes: Mapping[int, int]) -> dict[int, int]:
    """Return those of `processes`, pids with their start times, that run."""
    return {
        pid: started
        for pid, started in processes.items()
        if process_start_time(pid) == started
    }


def remove(path: str) -> None:
    """Remove a file, or a folder with all that it contains, if it exists."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    named = json.loads(_last_message(int(sys.argv[1])))
    if any(named.values()):
        _end(**named)


def _last_message(owner: int) -> bytes:
    """Return the last line on stdin, once that or the process `owner` has ended."""
    message, unfinished = b"{}", b""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    # In addition to stdin: a child that the owner forked may hold the other end of the
    # pipe open.
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(owner), select.POLLIN)
    while any(fd == 0 for fd, _ in poll.poll()):
        chunk = os.read(0, 65536)
        if not chunk:
            break
        *lines, unfinished = (unfinished + chunk).split(b"\n")
        message = lines[-1] if lines else message
    return message


def _end(pids: Sequence[Sequence[int]], files: Sequence[str], stop: list[str]) -> None:
    """Send SIGTERM and SIGKILL to processes and their descendants; remove `files`."""
    if stop:
        try:
            subprocess.run(stop, timeout=STOP_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired):
            # The processes of this machine are ended below in any case.
            pass
    processes = {pid: started for pid, started in pids}
    deadline = time.monotonic() + GRACE
    for signum in (signal.SIGTERM, signal.SIGKILL):
        processes.update(_descendants(processes))
        for pid in living(processes):
            with contextlib.suppress(OSError):
                os.kill(pid, signum)
        while living(processes) and time.monotonic() < deadline:
            time.sleep(0.05)
    for path in files:
        remove(path)


def _descendants(processes: Mapping[int, int]) -> dict[int, int]:
    """Return the descendants of `processes`, at any depth, with their start times."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: dict[int, int] = {}
    pending = list(living(processes))
    while pending:
        for child in children.get(pending.pop(), ()):
            started = process_start_time(child)
            if started is not None and child not in found and child not in processes:
                found[child] = started
                pending.append(child)
    return found


def _stat(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` from the state on; none without it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name, in parentheses, may contain anything: split after its end.
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    main()
