"""Latch: what `threading.Event` is, where an interrupt may come at any point."""

from __future__ import annotations

import queue

from ..bounded_get import bounded_get

__all__ = ["Latch"]


class Latch:
    """Threads wait until it is set, once and for good.

    An Event enters its Condition in Python: an interrupt there keeps the lock for good,
    so that `set`, and with it the abort of a group, hangs; a signal handler that calls
    `set` then waits for the thread that it interrupts. The queue is made for both.
    """

    __slots__ = ("_is_set", "_tokens")

    def __init__(self) -> None:
        self._is_set = False
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._tokens.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Block for `timeout` seconds at most; return whether it is set."""
        if not self._is_set:
            try:
                bounded_get(self._tokens, timeout)
            except queue.Empty:
                pass
            finally:
                # For the next thread that waits, also if an interrupt follows `get`.
                if self._is_set:
                    self._tokens.put(None)
        return self._is_set
