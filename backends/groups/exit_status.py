"""The exit status of a script whose results may be invalid.

An op on a GPU may fail after ``wait()`` returned: see `work.async_errors`. A script
that ends without an answer to such an error ends with a line on stderr and status
120.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from .world import world

__all__ = ["fail_on_async_error"]


def fail_on_async_error() -> None:
    """End the script with status 120 if an op failed unseen after ``wait()``.

    An exit handler, which a notebook's engine does without: its cells report.
    """
    error = world.async_error()
    if error is None or hasattr(sys, "ps1") or hasattr(sys, "last_value"):
        return
    with contextlib.suppress(OSError, ValueError):
        message = f"rankscope: results of this script are garbage: {error}"
        print(message, file=sys.stderr, flush=True)
    sys.stderr = _FailingStderr(sys.stderr)


class _FailingStderr:
    """A stderr whose last flush fails, for which Python ends with status 120.

    An exception of an exit handler does not change the status, and ``os._exit``
    would skip the exit handlers of others and what they flush. Python says nothing
    where stderr, unlike stdout, cannot be flushed.
    """

    closed = False

    def __init__(self, stderr: Any) -> None:
        self._stderr = stderr

    def flush(self) -> None:
        """Flush stderr, then fail."""
        if self._stderr is not None:
            self._stderr.flush()
        raise OSError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stderr, name)
