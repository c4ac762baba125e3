"""Errors that came after ``wait()`` had returned.

``wait()`` of an op on a GPU orders the caller's stream behind it and returns.
If the op is aborted afterwards, that stream goes on all the same, with garbage
in the arrays, and host code may sit in a ``synchronize()`` of cupy's that comes
back as if all were well. Whoever runs such code (a notebook's cell) asks here
when it is over.
"""

from __future__ import annotations

import threading

__all__ = ["note_late_error", "take_late_error"]

_lock = threading.Lock()
_first: BaseException | None = None


def note_late_error(error: BaseException) -> None:
    """Keep `error`, unless one is kept already: what follows is of the same cause."""
    global _first
    with _lock:
        _first = _first or error


def take_late_error() -> BaseException | None:
    """The first error since this was asked last, or ``None``."""
    global _first
    with _lock:
        error, _first = _first, None
    return error
