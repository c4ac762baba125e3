"""Errors that came after ``wait()`` had returned.

``wait()`` of an op on a GPU orders the caller's stream behind it and returns.
If the op is aborted afterwards, that stream goes on all the same, with garbage
in the arrays, and host code may sit in a ``synchronize()`` of cupy's that comes
back as if all were well. So such an error is kept until the caller has heard of
it: from a later op or wait of the group, or from a rebuild. A notebook's cell asks
here when it is over; a script hears of the rest from ``destroy_process_group()``,
or at its end.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recorder import GroupStatus

__all__ = ["caller_knows", "note_late_error", "take_late_error"]

_lock = threading.Lock()
_untold: dict[GroupStatus, BaseException] = {}


def note_late_error(status: GroupStatus, error: BaseException) -> None:
    """Keep `error` of a group, unless one is kept or the caller knows of its end."""
    with _lock:
        if not status.end_is_known:
            _untold.setdefault(status, error)


def caller_knows(status: GroupStatus) -> None:
    """The caller was told that the group ended: nothing of it comes too late now."""
    with _lock:
        status.end_is_known = True
        _untold.pop(status, None)


def take_late_error() -> BaseException | None:
    """The first error that nobody was told of, which forgets them all, or ``None``."""
    with _lock:
        error = next(iter(_untold.values()), None)
        _untold.clear()
    return error
