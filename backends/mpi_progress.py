"""The thread that lets MPI advance for Works that nobody waits for."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

from . import mpi_job

__all__ = ["Progress", "progress"]

# From the last thing that moved the thread spins for _SPIN seconds, yielding the
# core, and then takes naps, which grow to _NAP_MAX: less eager than a waiter, so
# as to leave core and interpreter to those who compute. Without anything to do
# it looks again every _NAP_MAX seconds, which spares those who issue ops a
# wake-up, and ends after _LINGER.
_SPIN = 1e-4
_NAP, _NAP_MAX = 2e-5, 1e-3
_LINGER = 0.5


class Queue(Protocol):
    """What is driven: see `mpi_queue.MPIQueue`."""

    waiting: set[int]

    @property
    def busy(self) -> bool:
        """Whether anything is in flight."""

    def advance(self) -> bool:
        """Do what can be done now; return whether anything moved."""


class Progress:
    """Drives queues for as long as they are busy, on one thread."""

    def __init__(self) -> None:
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def add(self, queue: Queue) -> None:
        """Drive `queue` for as long as it is busy."""
        with self._lock:
            self._queues.add(queue)
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._run, name="rankscope-mpi-progress", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """End the thread, for good."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        nap = _NAP
        busy_at = moved_at = time.monotonic()
        while not self._stopping:
            with self._lock:
                busy = [queue for queue in self._queues if queue.busy]
                now = time.monotonic()
                if busy:
                    busy_at = now
                elif now - busy_at > _LINGER:
                    self._queues.clear()
                    self._thread = None
                    return
            # Where somebody waits, his turns do more than ours would.
            alone = [queue for queue in busy if not queue.waiting]
            if not alone:
                time.sleep(_NAP_MAX)
            elif any([queue.advance() for queue in alone]):
                nap, moved_at = _NAP, time.monotonic()
            elif now - moved_at < _SPIN:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(1.5 * nap, _NAP_MAX)


#: The thread of this process.
progress = Progress()
mpi_job.at_exit(progress.stop)
