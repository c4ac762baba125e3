"""Find leaks: processes, threads and descriptors that outlive their owner."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import psutil

__all__ = ["Snapshot", "command", "lives"]


def lives(process: psutil.Process | int) -> bool:
    """Return whether `process`, or the one of that pid, runs; a zombie does not."""
    # Its parent may reap it between any two calls of psutil.
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(process: psutil.Process) -> str:
    """Return the command line of `process`, for messages."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(gone)"


def _descriptors() -> dict[int, str]:
    table = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            table[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor listdir itself had open
    return table


@dataclass(frozen=True)
class Snapshot:
    """The processes that this one has started, its threads and its descriptors."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    descriptors: dict[int, str]

    @classmethod
    def take(cls) -> Snapshot:
        processes = psutil.Process().children(recursive=True)
        # Python keeps the dummy object of a foreign thread for ever: not counted.
        threads = (
            thread
            for thread in threading.enumerate()
            if not isinstance(thread, threading._DummyThread)
        )
        return cls(
            frozenset(filter(lives, processes)), frozenset(threads), _descriptors()
        )

    def surplus(self, before: Snapshot) -> list[str]:
        """Return the kinds of resources that outnumber `before`, one line each.

        For owners that are replaced one by one, such as groups of which one is
        always open: a new resource is no leak, an additional one is.
        """
        fresh = {
            "processes": map(command, self.processes - before.processes),
            "threads": (thread.name for thread in self.threads - before.threads),
            "descriptors": (
                target
                for number, target in sorted(self.descriptors.items())
                if before.descriptors.get(number) != target
            ),
        }
        lines = []
        for kind, names in fresh.items():
            more = len(getattr(self, kind)) - len(getattr(before, kind))
            if more > 0:
                lines.append(f"{more} {kind} more, among: {', '.join([*names][:8])}")
        return lines
