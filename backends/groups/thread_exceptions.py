"""Exceptions that end threads: what those would have done is awaited for ever."""

from __future__ import annotations

import threading

from .inquiry import raised_at
from .world import world

__all__ = ["note_exceptions_of_threads"]


def note_exceptions_of_threads() -> None:
    """Have verdicts tell the last exception that has ended a thread of this rank."""
    original = threading.excepthook

    def note(end: threading.ExceptHookArgs) -> None:
        # As text: the exception would keep what its frames hold.
        if isinstance(end.exc_value, Exception):
            world.thread_exception = raised_at(end.exc_value)
        original(end)

    threading.excepthook = note
