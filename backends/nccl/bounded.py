"""Calls that may block: on a thread of their own, and waited for a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .. import thread_start

__all__ = [
    "ABORT_EACH",
    "ABORT_WAIT",
    "CLOSE_WAIT",
    "MUTEX_WAIT",
    "REVOKE_WAIT",
    "STORE_WAIT",
    "run_bounded",
    "start_thread",
]

#: Seconds that an abort, and an orderly end, may take before the caller goes on.
ABORT_WAIT = 0.8
CLOSE_WAIT = 5.0
#: Seconds after which an abort counts as stuck, for each communicator of the device
#: that is being aborted: ncclCommAbort takes up to 1 s, and the driver does parts of
#: several aborts one after the other.
ABORT_EACH = 2.0
#: Seconds for which an abort waits for the mutex of a communicator, whose holder
#: may be stuck in the very call that the abort is to end.
MUTEX_WAIT = 0.2
#: Seconds that the kernels of a communicator get to end after ncclCommRevoke; then
#: the communicator is aborted as if there were no ncclCommRevoke.
REVOKE_WAIT = 0.5
#: Seconds for which the store is asked which ranks are missing.
STORE_WAIT = 1.0


def run_bounded(name: str, task: Callable[[], None], seconds: float) -> bool:
    """Run `task` on a thread; return whether it ended within `seconds`."""
    thread = start_thread(f"nccl-{name}", task)
    if thread is None:
        return True
    thread.join(seconds)
    return not thread.is_alive()


def start_thread(name: str, task: Callable[[], None]) -> threading.Thread | None:
    """Start a daemon thread for `task` and return it.

    Where Python starts no thread any more (3.12 and later, at its end), `task` is
    run on the calling thread, and ``None`` is returned.
    """
    try:
        return thread_start.start_thread(name, task)
    except RuntimeError:
        task()
        return None
