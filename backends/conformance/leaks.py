"""Find leaks: processes, threads and descriptors that outlive their owner."""

from __future__ import annotations

import gc
import os
import threading
import time
import uuid
from dataclasses import dataclass

import psutil

__all__ = [
    "TOKEN",
    "Snapshot",
    "kill",
    "lives",
    "mark_this_process",
    "wait_until_clean",
]

# Every later process inherits this token, so that an orphan, which is no longer a
# descendant of this process, is found as well.
TOKEN = "RANKSCOPE_TEST_RUN"
_VALUE = uuid.uuid4().hex


def mark_this_process() -> None:
    """Put the token into the environment, for all processes to come."""
    os.environ[TOKEN] = _VALUE


def _processes() -> frozenset[psutil.Process]:
    found = set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN) == _VALUE and process.pid != os.getpid():
                found.add(process)
        except psutil.Error:
            continue  # gone by now, or somebody else's
    return frozenset(p for p in found if lives(p))


def lives(process: psutil.Process | int) -> bool:
    """Return whether `process`, or the one of that pid, runs; a zombie does not."""
    # Its parent may reap it between any two calls of psutil.
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
    """The processes, threads and descriptors of this test run at one moment."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    descriptors: dict[int, str]

    @classmethod
    def take(cls) -> Snapshot:
        """Return the snapshot of this moment."""
        # Python keeps the dummy object of a foreign thread for ever: not counted.
        threads = frozenset(
            thread
            for thread in threading.enumerate()
            if not isinstance(thread, threading._DummyThread)
        )
        return cls(_processes(), threads, _descriptors())

    def leaks(self, before: Snapshot) -> list[str]:
        """Return what exists now and did not exist `before`, one line each."""
        lines = [
            f"process {p.pid}: {_command(p)}" for p in self.processes - before.processes
        ]
        lines += [f"thread {t.name}" for t in self.threads - before.threads]
        # Numbers are reused and links may change, so the count decides.
        surplus = len(self.descriptors) - len(before.descriptors)
        if surplus > 0:
            fresh = [
                f"{number} -> {target}"
                for number, target in sorted(self.descriptors.items())
                if before.descriptors.get(number) != target
            ]
            lines.append(f"{surplus} descriptors, among: {', '.join(fresh)}")
        return lines

    def surplus(self, before: Snapshot) -> list[str]:
        """Return the kinds of resources that outnumber `before`, one line each.

        For owners that are replaced one by one, such as groups of which one is
        always open: a new resource is no leak, an additional one is.
        """
        kinds = {
            "processes": (
                [_command(process) for process in self.processes - before.processes],
                len(self.processes) - len(before.processes),
            ),
            "threads": (
                [thread.name for thread in self.threads - before.threads],
                len(self.threads) - len(before.threads),
            ),
            "descriptors": (
                [
                    target
                    for number, target in sorted(self.descriptors.items())
                    if before.descriptors.get(number) != target
                ],
                len(self.descriptors) - len(before.descriptors),
            ),
        }
        return [
            f"{more} {kind} more, among: {', '.join(names[:8])}"
            for kind, (names, more) in kinds.items()
            if more > 0
        ]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(gone)"


def wait_until_clean(before: Snapshot, seconds: float = 10) -> list[str]:
    """Wait until all resources newer than `before` are gone; return the rest."""
    deadline = time.monotonic() + seconds
    while (leaks := Snapshot.take().leaks(before)) and time.monotonic() < deadline:
        # Descriptors whose owner is garbage in a cycle are no leak.
        if not gc.collect():
            time.sleep(0.05)
    return leaks


def kill(before: Snapshot) -> None:
    """Kill the processes newer than `before`, so that one leak is one failure."""
    for process in Snapshot.take().processes - before.processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
