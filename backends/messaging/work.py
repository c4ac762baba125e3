"""MessageWork: a schedule of messages in flight, and how a thread waits for it."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from ..errors import DistBackendError
from ..work.op_type import OpType
from ..work.work import Work
from .algorithms import Flat, Schedule
from .mismatch import Members, mismatch
from .progress import Queue, progress, yield_core
from .transport import Received, Request

__all__ = ["DrivenQueue", "MessageWork"]

# The number of looks before the waiter looks at the clock, and lets other threads
# have the queue.
_LOOKS = 16

# Seconds after the last progress from which on the process's thread looks seldom.
_LONG = 0.5


class DrivenQueue(Queue, Protocol):
    """What the waiter of a Work drives: see `MessageQueue`."""

    opened: threading.Event

    def members(self) -> Members | None:
        """Return the ranks of the group, for messages."""

    def advance(self, looks: int = 1) -> bool:
        """Advance without blocking; return whether any op progressed."""

    def sleep(self, work: Work, timeout: float, idle: float) -> None:
        """Wait until something may have come for `work`."""

    @property
    def spin(self) -> float:
        """Seconds that a waiter spins before it sleeps."""


class MessageWork(Work):
    """A schedule of messages in flight."""

    __slots__ = ("queue", "requests", "schedule", "source", "tag")

    def __init__(
        self,
        queue: DrivenQueue,
        op_type: OpType,
        schedule: Schedule,
        tag: int,
        result: Any = None,
    ) -> None:
        super().__init__(op_type, result)
        self.queue = queue
        self.schedule = schedule
        self.tag = tag
        # What the present stage still waits for: the request, the bytes to be
        # received (-1: a send), and the array, which must stay alive.
        self.requests: list[tuple[Request, int, Flat]] = []
        # The sender of what was received last.
        self.source = -1

    def mismatch(self, received: Received, expected: int) -> DistBackendError:
        """Return the error of a message that is not what this op has to receive."""
        return mismatch(
            self.op_type, self.queue.members(), self.tag, received, expected
        )

    def detach(self) -> None:
        """Have the process's thread drive it, as no thread waits for it."""
        self.queue.advance()
        if not self.is_completed():
            progress.add(self.queue)

    def _block(self, timeout: float | None) -> bool:
        try:
            # What it waits for may be there already: then no clock is looked at.
            self.queue.advance(_LOOKS)
            over = self._state.is_terminal or self._drive(timeout)
        except BaseException:
            # An interrupt: the op continues, and other ranks depend on it.
            self.detach()
            raise
        if not over:
            self.detach()
        return over

    def _drive(self, timeout: float | None) -> bool:
        """Advance the queue for `timeout` seconds; return whether the op is over."""
        queue, me = self.queue, threading.get_ident()
        now = idle_from = time.monotonic()
        deadline = float("inf") if timeout is None else now + timeout
        try:
            queue.waiting.add(me)
            while now < deadline:
                if not queue.opened.is_set():
                    queue.opened.wait(min(0.1, deadline - now))
                    idle_from = time.monotonic()
                elif now - idle_from < queue.spin:
                    yield_core()
                else:
                    # For good: the queue gets back its thread when this one leaves.
                    queue.patient |= now - idle_from > _LONG
                    queue.sleep(self, deadline - now, now - idle_from)
                moved = queue.advance(_LOOKS)
                if self._state.is_terminal:
                    return True
                now = time.monotonic()
                if moved:
                    idle_from = now
            return False
        finally:
            queue.waiting.discard(me)
            if queue.patient:
                queue.patient = False
                progress.add(queue)
