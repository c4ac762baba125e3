"""The thread that drives the queues whose Works no thread waits for."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

from ..work.background_loop import BackgroundLoop

__all__ = ["Progress", "Queue", "progress"]

# After the last progress the thread spins for _SPIN seconds, yielding the
# core, and then takes naps, which grow to _NAP_MAX: less eager than a waiter, so
# as to leave core and interpreter to those who compute. Without anything to do
# it looks again every _NAP_MAX seconds, which spares those who issue ops a
# wake-up, and ends after _LINGER.
_SPIN = 1e-4
_NAP, _NAP_MAX = 2e-5, 1e-3
_LINGER = 0.5


class Queue(Protocol):
    """What the thread drives: see `MessageQueue`."""

    waiting: set[int]

    @property
    def busy(self) -> bool:
        """Whether an op is in flight."""

    def advance(self) -> bool:
        """Advance without blocking; return whether any op progressed."""


class Progress:
    """Drives queues for as long as they are busy, on one thread."""

    def __init__(self) -> None:
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._nap = _NAP
        self._busy_at = self._moved_at = 0.0
        self._loop = BackgroundLoop("rankscope-messages", self._advance)

    def add(self, queue: Queue) -> None:
        """Drive `queue` for as long as it is busy."""
        with self._lock:
            self._queues.add(queue)
            if self._loop.idle:
                self._nap, self._moved_at = _NAP, time.monotonic()
        self._loop.kick_if_idle()

    def stop(self) -> None:
        """End the thread, for good."""
        self._loop.stop()

    def _advance(self) -> float | None:
        with self._lock:
            busy = [queue for queue in self._queues if queue.busy]
            now = time.monotonic()
            if busy:
                self._busy_at = now
            elif now - self._busy_at > _LINGER:
                self._queues.clear()
                return None
        # The turns of a thread that waits do more than those of this one would.
        alone = [queue for queue in busy if not queue.waiting]
        if not alone:
            return _NAP_MAX
        if any([queue.advance() for queue in alone]):
            self._nap, self._moved_at = _NAP, time.monotonic()
            return 0.0
        if now - self._moved_at < _SPIN:
            os.sched_yield()
            return 0.0
        nap, self._nap = self._nap, min(1.5 * self._nap, _NAP_MAX)
        return nap


#: The thread of this process.
progress = Progress()
