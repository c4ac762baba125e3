"""The leaks of a test run: processes, threads and descriptors, also of orphans."""

from __future__ import annotations

import gc
import os
import time
import uuid

import psutil

from rankscope.backends.conformance.leaks import Snapshot, command, lives

__all__ = ["Snapshot", "kill", "leaks", "mark_this_process", "take", "wait_until_clean"]

# Every later process inherits this token, so that an orphan, which is no longer a
# descendant of this process, is found as well.
_TOKEN, _VALUE = "RANKSCOPE_TEST_RUN", uuid.uuid4().hex


def mark_this_process() -> None:
    """Put the token into the environment, for all processes to come."""
    os.environ[_TOKEN] = _VALUE


def take() -> Snapshot:
    """Return the snapshot of this moment, with the orphans."""
    found = Snapshot.take()
    return Snapshot(found.processes | _marked(), found.threads, found.descriptors)


def _marked() -> frozenset[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(_TOKEN) == _VALUE and process.pid != os.getpid():
                found.add(process)
        except psutil.Error:
            continue  # gone by now, or somebody else's
    return frozenset(process for process in found if lives(process))


def leaks(now: Snapshot, before: Snapshot) -> list[str]:
    """Return what exists `now` and did not exist `before`, one line each."""
    new = now.processes - before.processes
    lines = [f"process {process.pid}: {command(process)}" for process in new]
    lines += [f"thread {thread.name}" for thread in now.threads - before.threads]
    # Numbers are reused and links may change, so the count decides.
    surplus = len(now.descriptors) - len(before.descriptors)
    if surplus > 0:
        fresh = [
            f"{number} -> {target}"
            for number, target in sorted(now.descriptors.items())
            if before.descriptors.get(number) != target
        ]
        lines.append(f"{surplus} descriptors, among: {', '.join(fresh)}")
    return lines


def wait_until_clean(before: Snapshot, seconds: float = 10) -> list[str]:
    """Wait until all resources newer than `before` are gone; return the rest."""
    deadline = time.monotonic() + seconds
    while (left := leaks(take(), before)) and time.monotonic() < deadline:
        # Descriptors whose owner is garbage in a cycle are no leak.
        if not gc.collect():
            time.sleep(0.05)
    return left


def kill(before: Snapshot) -> None:
    """Kill the processes newer than `before`, so that one leak is one failure."""
    for process in take().processes - before.processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
