"""MessageQueue: the ops of one group in flight, over one transport.

A library of messages advances only inside its calls. So a thread that waits for a
Work drives the queue of its group; for Works that no thread waits for, `progress` does.
"""

from __future__ import annotations

import collections
import contextvars
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ConnectionLostError, DistBackendError, DistError
from ..thread_start import start_thread
from ..work.latch import Latch
from ..work.op_type import OpType
from ..work.work import Work
from .algorithms import SEND, Flat, Schedule, Transfer
from .progress import progress, yield_core
from .signature import Members, mismatch, unread
from .transport import Received, Request, Transport

__all__ = ["MessageQueue", "MessageWork"]

# Seconds that abandon() waits for a thread that is advancing the ops.
_ABANDON_PATIENCE = 1.0

# The number of looks before the waiter looks at the clock, and lets other threads
# have the queue.
_LOOKS = 16

# Seconds after the last progress from which on the process's thread looks seldom.
_LONG = 0.5

# The number of past collectives that messages tell of.
_REMEMBERED = 256


class MessageWork(Work):
    """A schedule of messages in flight."""

    __slots__ = ("over_ns", "queue", "requests", "schedule", "source", "tag")

    def __init__(
        self, queue: MessageQueue, op_type: OpType, schedule: Schedule, tag: int
    ) -> None:
        super().__init__(op_type)
        self.queue = queue
        self.schedule = schedule
        self.tag = tag
        # What the present stage still waits for: the request, the bytes to be
        # received (-1: a send), and the array, which must stay alive.
        self.requests: list[tuple[Request, int, Flat]] = []
        # The sender of what was received last.
        self.source = -1
        # When a collective was over: the next one may begin before that is reported.
        self.over_ns = 0

    def mismatch(self, received: Received, expected: int) -> DistBackendError:
        """Return the error of a message that is not what this op has to receive."""
        queue = self.queue
        return mismatch(
            *(self.op_type, queue.members(), self.tag),
            *(received, expected, queue.ended),
        )

    def detach(self) -> None:
        """Have the process's thread drive it, as no thread waits for it."""
        self.queue.advance()
        if not self._state.is_terminal:
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


class MessageQueue:
    """The ops of one group on this rank, over one transport.

    Collectives run one at a time in the order of issue, as one may read the
    result of the one before it. Sends and receives start at once, beside them.
    """

    def __init__(
        self, fail: Callable[[str | DistError], None], members: Callable[[], Members]
    ) -> None:
        #: Returns the ranks of the group, for messages.
        self.members = members
        self.opened = Latch()
        #: The threads that drive this queue because they wait for one of its Works.
        self.waiting = set[int]()
        #: Whether one of them has waited for long.
        self.patient = False
        #: Seconds after the last progress for which a waiter spins, yielding the core:
        #: then it sleeps, and leaves the core to the rank that it waits for.
        self.spin = 0.0
        self._fail = fail
        # Recursive, as a signal handler may abort the group in the midst of a call of
        # the transport: it must not wait for the thread that it interrupts.
        self._lock = threading.RLock()
        # The lock's owner is in such a call, or between two of them.
        self._inside = False
        self._is_open = False
        self._transport: Transport | None = None
        self._collectives: collections.deque[MessageWork] = collections.deque()
        #: The tags of the newest collectives whose schedules have ended.
        self.ended: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._messages: list[MessageWork] = []
        # The Work that was looked at last, and the one whose schedule is being resumed;
        # see _breaks.
        self._looked_at: MessageWork | None = None
        self._resumed: MessageWork | None = None
        # The Works that are over, until their ends are reported.
        self._over: list[MessageWork] = []
        # The error of an op that was being issued, until it has ended the group.
        self._unreported: Exception | None = None
        # Where reductions run: the IEEE results, whatever numpy.seterr says in the
        # thread that advances; an error there would end the group on some ranks.
        self._arithmetic = contextvars.Context()
        self._arithmetic.run(np.seterr, all="ignore")
        # Stages, of all Works.
        self._posted = 0
        self._closed = self._abandoned = False
        # A library may forget a request that failed, which then looks as if it had
        # arrived: after the first error nothing advances.
        self._broken = False

    def open(self, transport: Transport | None) -> None:
        """Start the ops issued meanwhile (``None``: of a group of one)."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._transport = transport
                if transport is not None:
                    self.spin = transport.spin
                self._is_open = True
                self.opened.set()
        if closed:
            if transport is not None:
                transport.abandon([])
            return
        self.advance()

    def submit(self, work: MessageWork, message: bool) -> None:
        """Start `work`: after the other collectives, or, if a `message`, at once.

        A collective that has none before it starts here, on the caller's thread; what
        it waits for is first looked at when a thread waits for it. The caller holds the
        lock of those who issue: no other Work is resumed, and no error reported, since
        callbacks may issue ops.
        """
        broken: BaseException | None = None
        with self._lock:
            if self._closed:
                raise DistBackendError("the connections of the group were abandoned")
            works = self._messages if message else self._collectives
            works.append(work)
            if self._inside:  # a signal handler, whose thread advances later
                return
            is_next = message or len(works) == 1
            if self._is_open and not self._broken and is_next:
                work._begin_unreported()
                messages = (work,) if message else ()
                broken = self._advance(int(message), messages, not message)
            if broken is not None and self._breaks(broken):
                self._unreported = _as_exception(broken)
        if work in self._over:
            self._report(work)
        if broken is not None:
            progress.add(self)
            if not isinstance(broken, Exception):
                raise broken

    @property
    def busy(self) -> bool:
        """Whether anything is in flight, or has an end that was not reported."""
        return bool(self._collectives or self._messages or self._over)

    def advance(self, looks: int = 1) -> bool:
        """Advance without blocking; return whether any op progressed.

        Any thread may call this; while one does, calls of others do nothing. The first
        collective is looked at up to `looks` times.
        """
        if not self._is_open or not self._lock.acquire(blocking=False):
            return False
        moved = False
        try:
            if self._inside:
                return False
            broken: BaseException | None = self._unreported
            self._unreported = None
            if not self._broken:
                posted = self._posted
                broken = self._advance(looks, self._messages, True)
                moved = self._posted != posted
        finally:
            self._lock.release()
        if self._over or broken is not None:
            self._settle(broken)
            return True
        return moved

    def _advance(
        self, looks: int, messages: Sequence[MessageWork], collectives: bool
    ) -> BaseException | None:
        """Resume what can be, under the lock; return the error that ends the group."""
        self._inside = True
        try:
            # Looked at after `_inside` is set, and again after it no longer is:
            # whenever a signal handler aborts, either it abandons the ops or this does.
            if self._closed:
                return None
            if messages:
                self._resume_messages(messages)
            queue, before = self._collectives, len(self._over)
            transport = self._transport
            while collectives and queue and self._resume(queue[0], looks):
                tag = queue[0].tag
                left = None if transport is None else transport.unread(tag)
                if left is not None:
                    raise unread(self.members(), tag, left, self.ended)
                self.ended.append(tag)
                # An interrupt may come at any point: the Work is in one of both.
                queue[0].over_ns = time.time_ns()
                self._over.append(queue[0])
                queue.popleft()
            if messages and len(self._over) > before:
                # The looks at the collective may have received one, and the thread that
                # waited for the collective looks no more.
                self._resume_messages(messages)
        except BaseException as error:  # noqa: BLE001 - it ends every Work
            self._broken = self._breaks(error)
            if isinstance(error, Exception):
                self._resumed = work = self._looked_at
                return self._mismatch(error, work) or error
            return error
        finally:
            self._leave()
        return None

    def _resume_messages(self, messages: Sequence[MessageWork]) -> None:
        for work in list(messages):
            if self._resume(work, 1):
                self._over.append(work)
                self._messages.remove(work)

    def _breaks(self, error: BaseException) -> bool:
        """Return whether `error` ends the group: an interrupt may have broken nothing.

        A schedule that was interrupted would look as if it had ended.
        """
        return isinstance(error, Exception) or self._resumed is not None

    def _mismatch(
        self, error: Exception, work: MessageWork | None
    ) -> DistBackendError | None:
        """Return what says more than `error`, if a message to `work` is too long."""
        transport = self._transport
        received = None if transport is None else transport.too_long(error)
        if received is None or work is None:
            return None
        _, expected, _ = work.requests[-1]
        made = work.mismatch(received, expected)
        made.__cause__ = error
        return made

    def _leave(self) -> None:
        """Do what a signal handler had to leave undone, under the lock."""
        self._inside = False
        if self._closed:
            self._abandon()

    def _settle(self, broken: BaseException | None) -> None:
        """End Works and, after an error, the group; the lock is free."""
        for work in list(self._over):
            self._report(work)
        if broken is not None:
            self._fail_after(broken)
        others = len(self.waiting) - (threading.get_ident() in self.waiting)
        transport = self._transport
        if others and transport is not None:
            # What came for one waiter may have ended the Work of another one.
            transport.wake()

    def _report(self, work: MessageWork) -> None:
        """End `work`, which is over; after an interrupt it is ended the next time."""
        source = work.source if work.op_type is OpType.RECV else None
        work.mark_completed(source, completed_ns=work.over_ns or None)
        # suppress() would cost each op 0.3 µs.
        try:
            self._over.remove(work)
        except ValueError:
            pass  # another thread has ended it, too

    def sleep(self, work: Work, timeout: float, idle: float) -> None:
        """Wait until something may have come for `work`, `timeout` seconds at most."""
        transport = self._transport
        # A thread that ended the Work before arm() has woken no waiter.
        if self.arm() and transport is not None and not work.state.is_terminal:
            transport.sleep(timeout, idle)

    def arm(self) -> bool:
        """Have the transport report arrivals; ``False``: advance first."""
        with self._lock:
            transport = self._transport
            if transport is None or self._inside:
                return False
            self._inside = True
            try:
                return not self._closed and transport.arm()
            finally:
                self._leave()

    def fileno(self) -> int | None:
        transport = self._transport
        return None if transport is None else transport.fileno()

    def _resume(self, work: MessageWork, looks: int) -> bool:
        """Resume `work` as far as its messages allow; return whether it is over."""
        requests, transport, tag = work.requests, self._transport, work.tag
        self._looked_at = work
        if not work.started_ns:
            work.mark_started()
        while True:
            while requests:
                request, expected, _ = requests[-1]
                assert transport is not None
                if not looks or not transport.test(request, looks):
                    return False
                if expected >= 0:
                    if not transport.fits(request, expected, tag):
                        raise work.mismatch(transport.received(request), expected)
                    if work.op_type is OpType.RECV:
                        work.source = transport.received(request).source
                requests.pop()
            if self._closed:  # by a signal handler, just now
                return False
            self._resumed = work
            stage = self._arithmetic.run(next, work.schedule, None)
            if stage is not None:
                self._post(work, stage)
            self._resumed = None
            if stage is None:
                return True

    def _post(self, work: MessageWork, stage: list[Transfer]) -> None:
        transport, requests, tag = self._transport, work.requests, work.tag
        assert transport is not None
        self._posted += 1
        limit = transport.max_message
        for kind, peer, array in stage:
            nbytes = array.nbytes
            if nbytes > limit:
                pieces = _pieces(array, limit)
            elif nbytes or work.op_type.is_p2p:
                pieces = (array,)
            else:
                continue
            for piece in pieces:
                if kind is SEND:
                    request = transport.send(piece, peer, tag)
                    if request is not None:
                        requests.append((request, -1, piece))
                else:
                    request = transport.receive(piece, peer, tag)
                    if request is None:
                        work.source = peer
                    else:
                        requests.append((request, piece.nbytes, piece))

    def _fail_after(self, error: BaseException) -> None:
        """Fail the group after `error`; re-raise an interrupt that broke nothing."""
        breaks = self._breaks(error)
        work, self._resumed = self._resumed, None
        if not breaks:
            raise error
        culprit = work or next(iter([*self._messages, *self._collectives]), None)
        reason = self._explain(error)
        # The group first, whose abort ends the Works: a thread that waits for one
        # may rebuild the group at once, and the other ranks would not be informed.
        self._fail(reason)
        if culprit is not None:
            if isinstance(reason, ConnectionLostError):
                cause: DistBackendError = reason
            else:
                cause = DistBackendError(f"{culprit.describe()} failed: {reason}")
            cause.__cause__ = error
            culprit.mark_failed(cause)
        if not isinstance(error, Exception):
            raise error

    def _explain(self, error: BaseException) -> str | DistError:
        transport = self._transport
        reason = None if transport is None else transport.explain(error)
        return reason or str(error) or type(error).__name__

    def abandon(self) -> None:
        """Refuse further ops and abandon those in flight; waits for no other rank."""
        self._closed = True
        if self._lock.acquire(timeout=_ABANDON_PATIENCE):
            try:
                done = not self._inside
                if done:
                    self._abandon()
            finally:
                self._lock.release()
        else:
            done = False
        if not done:
            # A call of the transport has to come to its end first: one of another
            # thread that takes long, or one of this thread, and this is a signal
            # handler. Whoever made the call sees to it, too; but an interrupt may
            # keep it from that.
            start_thread("abandon", self._abandon_later)
        self.opened.set()
        if self._transport is not None:
            self._transport.wake()

    def _abandon_later(self) -> None:
        with self._lock:
            self._abandon()

    def _abandon(self) -> None:
        if self._abandoned:
            return
        self._abandoned = True
        works = [*self._collectives, *self._messages]
        self._collectives.clear()
        self._messages.clear()
        in_flight = [
            (request, array, expected >= 0)
            for work in works
            for request, expected, array in work.requests
        ]
        for work in works:
            work.requests.clear()
        if self._transport is not None:
            self._transport.abandon(in_flight)

    def close(self) -> None:
        """Close the transport: nothing is in flight."""
        with self._lock:
            transport = None
            if not self._inside:
                self._closed = True
                transport, self._transport = self._transport, None
        if not self._closed:  # a signal handler, whose thread uses the transport
            self.abandon()
        elif transport is not None:
            transport.close()


def _as_exception(error: BaseException) -> Exception:
    """Return `error`, or one that an interrupt is the cause of."""
    if isinstance(error, Exception):
        return error
    made = DistBackendError(type(error).__name__)
    made.__cause__ = error
    return made


def _pieces(array: Flat, limit: int) -> tuple[Flat, ...]:
    """Cut the flat `array` into messages of `limit` bytes."""
    view = array.view(np.uint8)
    return tuple(view[start : start + limit] for start in range(0, view.size, limit))
