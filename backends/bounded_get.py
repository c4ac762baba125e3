"""A wait for the next item of a queue that ends on every Python."""

from __future__ import annotations

import queue
from typing import TypeVar

__all__ = ["bounded_get"]

_T = TypeVar("_T")

# Seconds. Where the time runs out between two looks of its C code at the clock,
# ``SimpleQueue.get`` of CPython 3.10 to 3.12 waits for ever.
_SHORTEST = 1e-3


def bounded_get(items: queue.SimpleQueue[_T], timeout: float | None) -> _T:
    """Return the next item, waiting `timeout` seconds at most; ``None``: for ever."""
    return items.get(timeout is None or timeout >= _SHORTEST, timeout)
