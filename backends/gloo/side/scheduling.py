"""How the kernel schedules the thread of gloo that reads and writes the sockets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["yielding_threads"]

# A rank has three: its own, the one that calls gloo, and gloo's.
_THREADS_OF_A_RANK = 3


@contextlib.contextmanager
def yielding_threads(size: int) -> Iterator[None]:
    """Have the threads that start in the block take no core from another thread.

    A message wakes gloo's thread. If it then takes the core from the thread that calls
    gloo while that one holds the lock of the connection, it does not wait for the
    lock: it asks the kernel for the same event again until its time slice ends, 4 ms
    later. With two ranks on two cores an all_reduce of 1 MiB took 3.5 ms instead of
    0.6. Such a thread is late where other programs keep all cores busy: with cores for
    the threads of all `size` ranks, nothing is changed.
    """
    policy = os.sched_getscheduler(0)
    if (
        policy != os.SCHED_OTHER
        or len(os.sched_getaffinity(0)) >= _THREADS_OF_A_RANK * size
    ):
        yield
        return
    # A new thread inherits the policy of the one that starts it.
    _schedule(os.SCHED_BATCH)
    try:
        yield
    finally:
        _schedule(policy)


def _schedule(policy: int) -> None:
    # A sandbox may not allow it, and gloo works without.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
