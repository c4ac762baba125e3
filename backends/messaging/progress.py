"""The thread that drives the queues whose Works no thread waits for."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from ..work.threads import BackgroundLoop

__all__ = ["Progress", "Queue", "progress", "yield_core"]

#: Lets another thread or process have this core.
yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))

# After the last progress the thread spins for _SPIN seconds, yielding the core, and
# then sleeps: on the descriptors of the transports, or, where one has none, by naps,
# which grow with the time since then. It is less eager than a waiter, so as to leave
# core and interpreter to those who compute.
_SPIN = 1e-4
_NAP, _NAP_MAX = 2e-5, 5e-3
# While other threads drive the queues, or there is nothing to do, it looks again from
# time to time, which spares those who issue ops a wake-up; it ends after _LINGER.
_LOOK, _LOOK_MAX = 1e-3, 2e-2
_LINGER = 0.5
# Where all of these threads have waited for long, they tell when they leave.
_PATIENT_LOOK = 0.5
# Seconds of a sleep on descriptors, at most.
_SLEEP = 1.0


class Queue(Protocol):
    """What the thread drives: see `MessageQueue`."""

    waiting: set[int]
    #: Whether a thread has waited for long: it calls `Progress.add` when it leaves.
    patient: bool

    @property
    def busy(self) -> bool:
        """Whether an op is in flight."""

    def advance(self) -> bool:
        """Advance without blocking; return whether any op progressed."""

    def fileno(self) -> int | None:
        """Return the descriptor that tells, after `arm`, that something has come."""

    def arm(self) -> bool:
        """Have the descriptor tell; ``False``: there is something to do first."""


class Progress:
    """Drives queues for as long as they are busy, on one thread."""

    def __init__(self) -> None:
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._busy_at = self._moved_at = 0.0
        # Whether the thread looks seldom, as others have waited for long.
        self._patient = False
        # While the thread sleeps on descriptors: one of its own, to wake it.
        self._bell: int | None = None
        self._stopped = False
        self._loop = BackgroundLoop("rankscope-messages", self._advance)

    def add(self, queue: Queue) -> None:
        """Drive `queue` for as long as it is busy."""
        with self._lock:
            self._queues.add(queue)
            if self._loop.idle:
                self._moved_at = time.monotonic()
            self._ring()
            patient = self._patient
        if patient:
            self._loop.kick()
        else:
            self._loop.kick_if_idle()

    def stop(self) -> None:
        """End the thread, for good."""
        with self._lock:
            self._stopped = True
            self._ring()
        self._loop.stop()

    def _ring(self) -> None:
        if self._bell is not None:
            os.write(self._bell, b"\0")

    def _advance(self) -> float | None:
        with self._lock:
            busy = [queue for queue in self._queues if queue.busy]
            now = time.monotonic()
            if busy:
                self._busy_at = now
            elif now - self._busy_at > _LINGER:
                self._queues.clear()
                return None
            self._patient = bool(busy) and all(
                queue.waiting and queue.patient for queue in busy
            )
        if self._patient:
            return _PATIENT_LOOK
        idle = now - self._moved_at
        # The turns of a thread that waits do more than those of this one would.
        alone = [queue for queue in busy if not queue.waiting]
        if not alone:
            return min(max(idle / 8, _LOOK), _LOOK_MAX)
        if any([queue.advance() for queue in alone]):
            self._moved_at = time.monotonic()
            return 0.0
        if idle < _SPIN:
            yield_core()
            return 0.0
        descriptors = [queue.fileno() for queue in alone]
        told = [number for number in descriptors if number is not None]
        if len(told) < len(alone):
            return min(max(idle / 8, _NAP), _NAP_MAX)
        # A queue whose waiter leaves tells nobody.
        self._sleep(alone, busy, told, _SLEEP if alone == busy else _LOOK_MAX)
        return 0.0

    def _sleep(
        self,
        alone: Sequence[Queue],
        known: Sequence[Queue],
        descriptors: Sequence[int],
        timeout: float,
    ) -> None:
        """Wait until something has come for the queues that are `alone`, or `add`."""
        with self._lock:
            if self._stopped or any(
                queue.busy and queue not in known for queue in self._queues
            ):
                return
            bell, ring = os.pipe()
            self._bell = ring
        try:
            poll = select.poll()
            for number in (bell, *descriptors):
                poll.register(number, select.POLLIN)
            if all([queue.arm() for queue in alone]):
                poll.poll(timeout * 1e3)
        finally:
            with self._lock:
                self._bell = None
                os.close(ring)
                os.close(bell)


#: The thread of this process.
progress = Progress()
# A forked child has neither the thread nor the queues.
os.register_at_fork(after_in_child=progress.__init__)  # type: ignore[misc]
