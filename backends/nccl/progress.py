"""The progress thread of NCCL: advances the launch queues while no thread waits.

Three things can only be polled: the creation of a communicator, a call that NCCL
continues in the background, and an event on the device. A blocking wait for one of
these would delay the others. One thread per process polls for all devices.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import DistError
from ..work.threads import BackgroundLoop

__all__ = ["LOOK_WAIT", "Progress", "progress"]

#: Seconds to wait, in `Progress.poll`, for a look at the ops in flight: the thread may
#: be stuck in a call.
LOOK_WAIT = 0.05

# Seconds between two polls: _NAP after progress, growing to _NAP_MAX without progress.
_NAP, _NAP_MAX = 5e-5, 2e-3
# Seconds of further polling after the last op has ended: otherwise a loop of short ops
# would wake the thread for each op, and the thread would compete for the GIL.
_LINGER = 0.1
# Seconds between two polls after that; `Progress.add` wakes the thread.
_SLEEP = 60.0
# Seconds without a poll after which a thread counts as stuck in a call.
_STUCK = 2.0


class Queue(Protocol):
    """The part of `DeviceQueue` that the progress thread uses."""

    api: Any
    device: int
    last_advance: float

    def advance(self) -> bool: ...
    @property
    def busy(self) -> bool: ...


class Progress:
    """Advances the busy launch queues, and runs callbacks, on one thread.

    The thread runs while a queue is open, even if no queue is busy: an exiting
    interpreter starts no threads, and only this thread advances the ops of a blocking
    communicator then.
    """

    def __init__(self) -> None:
        self._open: collections.Counter[Queue] = collections.Counter()
        self._busy: set[Queue] = set()
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        # Set after the next time that every busy queue was advanced.
        self._waiting: collections.deque[threading.Event] = collections.deque()
        self._lock = threading.Lock()
        self._nap, self._used = _NAP, 0.0
        self._asleep = False
        self._loop = BackgroundLoop("rankscope-nccl", self._work)

    @property
    def running(self) -> bool:
        return self._loop.running

    def open(self, queue: Queue) -> None:
        """Count one more stream that uses `queue`."""
        with self._lock:
            self._open[queue] += 1
        self._loop.kick()

    def close(self, queue: Queue) -> None:
        """Count one stream less that uses `queue`; undoes one `open`."""
        with self._lock:
            self._open[queue] -= 1
            if not self._open[queue]:
                del self._open[queue]
        self._loop.kick()

    def add(self, queue: Queue, *, soon: bool) -> None:
        """Advance `queue` while `queue` is busy; wake the thread now if `soon`."""
        with self._lock:
            if queue not in self._busy:
                queue.last_advance = time.monotonic()
                self._busy.add(queue)
            kick = soon or self._asleep
        if kick:
            self._loop.kick()

    def call(self, task: Callable[[], None]) -> None:
        """Run `task` on the progress thread, which is woken for the task."""
        self._tasks.append(task)
        self._loop.kick()

    def poll(self, seconds: float) -> bool:
        """Have the busy queues advanced once, now; return whether within `seconds`.

        The progress thread does it: the caller, such as the watchdog, must not call
        CUDA, which may block while a kernel hangs.
        """
        advanced = threading.Event()
        self._waiting.append(advanced)
        return self._loop.kick() and advanced.wait(seconds)

    def stuck_for(self) -> float:
        """Return the seconds that a thread has been stuck in a call; 0 if none is."""
        now = time.monotonic()
        with self._lock:
            last = min((queue.last_advance for queue in self._busy), default=now)
        return now - last if now - last > _STUCK else 0.0

    def _work(self) -> float | None:
        """Poll once; return the seconds until the next poll, ``None`` to end."""
        moved = False
        while self._tasks:
            self._tasks.popleft()()
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for queue in list(self._busy):
            moved = self._advance(queue) or moved
        for advanced in waiting:
            advanced.set()
        now = time.monotonic()
        with self._lock:
            self._busy = {queue for queue in self._busy if queue.busy}
            if self._busy or moved:
                self._used = now
            self._asleep = now - self._used > _LINGER
            if not self._open and not self._busy and not self._tasks:
                return None
        if self._asleep:
            return _SLEEP
        self._nap = _NAP if moved else min(1.5 * self._nap, _NAP_MAX)
        return self._nap

    def _advance(self, queue: Queue) -> bool:
        # The device is not switched back: the switch could create a context on a GPU
        # that this process does not use. `advance` reports the error of a bad device.
        with contextlib.suppress(DistError):
            queue.api.cuda.use(queue.device)
        return queue.advance()


#: The progress thread of this process.
progress = Progress()
