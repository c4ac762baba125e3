"""Errors that were detected after ``wait()`` had returned (c10d: async errors).

``wait()`` of an op on a GPU orders the caller's stream behind the op and returns.
If the op is aborted afterwards, that stream goes on all the same, with garbage
in the arrays, and a ``synchronize()`` of cupy's returns as if nothing had failed.
Such an error is kept until the caller has observed it: in a later op or wait of
the group, or by a rebuild. The end of a notebook's cell raises it; in a script
``destroy_process_group()`` does, or else the exit status shows it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .flight_recorder import GroupCounters

__all__ = ["acknowledge", "record_async_error", "take_async_error"]

_lock = threading.Lock()
_unobserved: dict[GroupCounters, BaseException] = {}


def record_async_error(status: GroupCounters, error: BaseException) -> None:
    """Keep the first `error` of a group, unless the group's abort was observed."""
    with _lock:
        if not status.abort_observed:
            _unobserved.setdefault(status, error)


def acknowledge(status: GroupCounters) -> None:
    """Mark the group's abort as observed; later errors of the group are dropped."""
    with _lock:
        status.abort_observed = True
        _unobserved.pop(status, None)


def take_async_error() -> BaseException | None:
    """Return the first error that was not observed, or ``None``; forget them all."""
    with _lock:
        error = next(iter(_unobserved.values()), None)
        _unobserved.clear()
    return error
