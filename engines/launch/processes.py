"""Processes of this machine: signals, waiting for their ends, what commands print."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping

import psutil

from rankscope.backends.stores import process_end

__all__ = [
    "is_stopped",
    "lives",
    "printed",
    "send_signal",
    "wait_gone",
    "with_descendants",
]


def send_signal(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def printed(*command: str, timeout: float, env: Mapping[str, str] | None = None) -> str:
    """Return what a command prints; of one that takes longer nothing."""
    try:
        return subprocess.run(
            command,
            env=env,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired:
        return ""


def is_stopped(pid: int, host: str | None = None) -> bool:
    """Return whether a process of `host`, by default this one, is stopped."""
    return host in (None, socket.gethostname()) and process_end.is_stopped(pid)


def wait_gone(processes: Iterable[psutil.Process], timeout: float) -> None:
    """Wait until all `processes` have ended, at most `timeout` s."""
    deadline = time.monotonic() + timeout
    waiting = list(processes)
    # Not psutil.wait_procs: it waits for each in turn, and without end for a
    # zombie that its parent does not reap.
    while any(map(lives, waiting)) and time.monotonic() <= deadline:
        time.sleep(0.01)


def with_descendants(roots: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """Return pid → process of the living `roots` and their living descendants."""
    children: dict[int, list[psutil.Process]] = {}
    # One pass over all processes, however many roots there are.
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            children.setdefault(process.ppid(), []).append(process)
    found: dict[int, psutil.Process] = {}
    waiting = [process for process in roots if lives(process)]
    while waiting:
        process = waiting.pop()
        if process.pid not in found:
            found[process.pid] = process
            waiting += children.get(process.pid, ())
    return found


def lives(process: psutil.Process) -> bool:
    """Return whether a process runs and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
