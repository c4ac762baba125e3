"""The thread that makes NCCL's Works advance while nobody waits for them.

A communicator that is being made, a call that NCCL goes on with in the
background and an event on the device can only be asked, not waited for without
holding up everything else. One thread of the process asks for all groups.
"""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["progress"]

# Seconds between two looks: short while things happen, longer while nothing does.
_NAP, _NAP_MAX = 5e-5, 2e-3


class _Advancing(Protocol):
    def advance(self) -> bool: ...

    @property
    def busy(self) -> bool: ...


class _Progress:
    def __init__(self) -> None:
        self._queues: set[_Advancing] = set()
        self._lock = threading.Lock()
        self._kick = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, queue: _Advancing) -> None:
        """Advance `queue` until it is no longer busy."""
        if queue in self._queues:
            return
        with self._lock:
            self._queues.add(queue)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rankscope-nccl", daemon=True
                )
                self._thread.start()
        self._kick.set()

    def _run(self) -> None:
        nap = _NAP
        while True:
            moved = False
            for queue in list(self._queues):
                moved = queue.advance() or moved
            with self._lock:
                self._queues = {queue for queue in self._queues if queue.busy}
                if not self._queues:
                    self._thread = None
                    return
            nap = _NAP if moved else min(1.5 * nap, _NAP_MAX)
            self._kick.wait(nap)
            self._kick.clear()


#: The one of this process.
progress = _Progress()
