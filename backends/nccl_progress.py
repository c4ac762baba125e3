"""The thread that makes NCCL's Works advance while nobody waits for them.

A communicator that is being made, a call that NCCL goes on with in the
background and an event on the device can only be asked, not waited for without
holding up everything else. One thread of the process asks for all devices.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from .errors import DistError

__all__ = ["progress"]

# Seconds between two looks: short while things happen, longer while nothing does.
_NAP, _NAP_MAX = 5e-5, 2e-3
# Seconds for which it goes on to look when nothing is under way: a loop of short ops
# would wake it for each, and has it wait for the interpreter.
_LINGER = 0.1
# Seconds without a look after which the thread counts as stuck in a call.
_STUCK = 2.0


class _Lane(Protocol):
    seam: Any
    device: int
    looked: float

    def advance(self) -> bool: ...

    @property
    def busy(self) -> bool: ...


class _Progress:
    """While a lane is `open`, the thread lives; while one is busy, it looks."""

    def __init__(self) -> None:
        self._open: collections.Counter[_Lane] = collections.Counter()
        self._busy: set[_Lane] = set()
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._lock = threading.Lock()
        self._kick = threading.Event()
        self._thread: threading.Thread | None = None
        self._asleep = False

    def open(self, lane: _Lane) -> None:
        """A queue is there that uses `lane`."""
        with self._lock:
            self._open[lane] += 1
            self._start()

    def close(self, lane: _Lane) -> None:
        """A queue that was opened is gone."""
        with self._lock:
            self._open[lane] -= 1
            if not self._open[lane]:
                del self._open[lane]
        self._kick.set()

    def add(self, lane: _Lane, *, soon: bool) -> None:
        """Advance `lane` until it is no longer busy; `soon`: now, else by and by."""
        with self._lock:
            if lane not in self._busy:
                lane.looked = time.monotonic()
                self._busy.add(lane)
            kick = soon or self._asleep
        if kick:
            self._kick.set()

    def call(self, task: Callable[[], None]) -> None:
        """Run `task` on the thread, soon."""
        with self._lock:
            self._tasks.append(task)
            # Python 3.12 starts no thread at its end, when nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self._start()
        self._kick.set()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="rankscope-nccl", daemon=True
            )
            self._thread.start()

    def stuck_for(self) -> float:
        """Seconds for which somebody has been stuck in a call; mostly 0."""
        now = time.monotonic()
        with self._lock:
            seconds = max((now - lane.looked for lane in self._busy), default=0.0)
        return seconds if seconds > _STUCK else 0.0

    def _run(self) -> None:
        nap, used = _NAP, time.monotonic()
        while True:
            moved = False
            while self._tasks:
                self._tasks.popleft()()
            for lane in list(self._busy):
                moved = self._advance(lane) or moved
            now = time.monotonic()
            with self._lock:
                self._busy = {lane for lane in self._busy if lane.busy}
                if not self._open and not self._busy and not self._tasks:
                    self._thread = None
                    return
                if self._busy or moved:
                    used = now
                self._asleep = now - used > _LINGER
            nap = _NAP if moved else min(1.5 * nap, _NAP_MAX)
            self._kick.wait(None if self._asleep and not self._tasks else nap)
            self._kick.clear()

    def _advance(self, lane: _Lane) -> bool:
        # To stay: to go back to another one could wake a GPU that is not ours.
        with contextlib.suppress(DistError):  # `advance` tells it to the groups
            lane.seam.cuda.use(lane.device)
        return lane.advance()


#: The one of this process.
progress = _Progress()
