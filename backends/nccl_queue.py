"""NCCL's side of a Work: from the call to the end event on the device.

An op goes through three places. It waits on the host until its communicator is
there and NCCL is done with the call before it; then it is given to NCCL, on a
stream of our own that first waits for what the caller's streams had been given
by then; once NCCL has launched it, an end event is recorded behind it. The
Work is over when that event was reached.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from .errors import DistBackendError, DistError
from .late_errors import caller_knows, note_late_error
from .nccl_comm import CLOSE_WAIT, MUTEX_WAIT, NCCLComm, abort_together, nonblocking
from .nccl_progress import progress
from .nccl_seam import Seam
from .work import OpType, Work, WorkState

__all__ = ["Call", "Launch", "NCCLQueue", "NCCLWork", "abort_queues"]

#: What gives an op to NCCL: ``call(communicator's handle, stream)``.
Call = Callable[[Any, int], None]

_log = logging.getLogger(__name__)

# A waiter looks this often, in seconds: at first often, then less.
_NAP, _NAP_MAX = 1e-5, 5e-4


class NCCLWork(Work):
    """An op on the device.

    ``wait()`` makes the caller's current stream wait for it and returns, as in
    c10d: the host does not wait, and host code sees the result after it has
    synchronized that stream. ``wait(timeout)`` and ``synchronize()`` block
    until the op is over. Each of them raises what became of the op, also when
    that was an abort, after which a stream synchronizes with garbage in the
    arrays.
    """

    __slots__ = ("blocking", "launch", "trusted")

    on_device = True
    reports_start = True

    def __init__(self, op_type: OpType, result: Any = None) -> None:
        super().__init__(op_type, result)
        self.launch: Launch | None = None
        #: Whether wait() blocks the host, too (barrier).
        self.blocking = False
        #: Whether wait() returned, or is about to, although the op was not over.
        self.trusted = False

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        launch = self.launch
        if timeout is not None or self.blocking or launch is None:
            return self._finish(timeout)
        if not self.is_completed():
            launch.join_streams(self)
            # In this order: an abort retires the queue before it ends any Work, and
            # before any kernel ends.
            self.trusted = True
            if not launch.queue.retired:
                return True
        return self._finish(None)

    def synchronize(self) -> None:
        """Block until the op is over; raise its error."""
        self._finish(None)

    def _finish(self, timeout: float | timedelta | None) -> bool:
        try:
            return super().wait(timeout)
        finally:
            if self._exception is not None and self.record is not None:
                caller_knows(self.record.status)

    def mark_failed(
        self, error: BaseException, state: WorkState = WorkState.FAILED
    ) -> bool:
        ended = super().mark_failed(error, state)
        if ended and self.trusted and self.record is not None:
            assert self._exception is not None
            note_late_error(self.record.status, self._exception)
        return ended

    def _block(self, timeout: float | None) -> bool:
        launch = self.launch
        deadline = None if timeout is None else time.monotonic() + timeout
        if launch is not None and launch.queue.wait_for(self.is_completed, timeout):
            return True
        # Whoever aborts the queue ends the Work a moment later.
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return super()._block(left)


class Launch:
    """What is given to NCCL at once: one op, or a batch within one NCCL group."""

    __slots__ = ("calls", "end", "given", "kept", "queue", "ready", "start", "works")

    def __init__(
        self,
        queue: NCCLQueue,
        works: Sequence[NCCLWork],
        calls: Sequence[Call],
        kept: Sequence[Any],
        ready: Sequence[Any],
    ) -> None:
        self.queue = queue
        self.works = works
        self.calls = calls
        #: Arrays that must stay as they are until the op is over: their memory
        #: pool would give them to somebody else without asking our stream.
        self.kept = kept
        #: Events of the caller's streams that come before.
        self.ready = ready
        self.start: Any = None
        self.end: Any = None
        #: Whether NCCL has it, though it may not have launched it yet.
        self.given = False
        for work in works:
            work.launch = self

    def join_streams(self, work: NCCLWork) -> None:
        """Make the caller's current streams wait for the end of this, of `work`.

        Blocks only until NCCL has launched it.
        """
        queue = self.queue
        queue.wait_for(lambda: self.end is not None or work.is_completed(), None)
        if not work.is_completed():
            queue.join(self)


class NCCLQueue:
    """The ops of one group on one device of this rank, in order of issue."""

    def __init__(self, seam: Seam, comm: NCCLComm, fail: Callable[[str], None]) -> None:
        self.comm = comm
        self._seam, self._fail = seam, fail
        with seam.cuda.device(comm.device):
            self.stream = seam.cuda.new_stream()
        self._waiting: collections.deque[Launch] = collections.deque()
        self._in_flight: collections.deque[Launch] = collections.deque()
        self._events: dict[bool, list[Any]] = {True: [], False: []}
        comm.on_error = self._break
        self._retired = threading.Event()
        self._lent = threading.Event()

    @property
    def retired(self) -> bool:
        """Whether it was aborted or closed: what is not over will not be well."""
        return self._retired.is_set()

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._waiting or self._in_flight)

    @property
    def launched(self) -> bool:
        """Whether NCCL has something of it to do."""
        return bool(self._in_flight) or any(one.given for one in list(self._waiting))

    # -- in ----------------------------------------------------------------------

    def submit(
        self, works: Sequence[NCCLWork], calls: Sequence[Call], kept: Sequence[Any]
    ) -> None:
        """Issue an op, or a batch as one; `kept` is what it reads and writes."""
        if self._retired.is_set():
            raise DistBackendError(f"{self.comm.name} was {self.comm.state.value}")
        cuda = self._seam.cuda
        ready = []
        with cuda.device(self.comm.device):
            for stream in cuda.current_streams(self.comm.device):
                event = self._event(timed=False)
                cuda.record(event, stream)
                ready.append(event)
        launch = Launch(self, works, calls, kept, ready)
        self._waiting.append(launch)
        self.advance()
        if self.busy:
            progress.add(self)

    def _event(self, *, timed: bool) -> Any:
        try:
            return self._events[timed].pop()
        except IndexError:
            return self._seam.cuda.new_event(timed=timed)

    # -- forward -------------------------------------------------------------------

    def advance(self) -> bool:
        """Do what can be done now; say whether anything moved. Never blocks."""
        comm = self.comm
        if not comm.mutex.acquire(blocking=False):
            return False
        over: list[tuple[Launch, float | None]] = []
        broken: Exception | None = None
        moved = False
        try:
            if self._retired.is_set() or self._lent.is_set():
                return False
            with self._seam.cuda.device(comm.device):
                moved = self._give()
                self._reap(over)
        except Exception as error:  # noqa: BLE001 - every Work has to hear of it
            broken = error
        finally:
            comm.mutex.release()
        for launch, elapsed_ms in over:
            self._end(launch, elapsed_ms)
        if broken is not None:
            self._break(broken)
        return moved or bool(over)

    def _give(self) -> bool:
        """Give to NCCL what can be given; the mutex is held."""
        moved = False
        while self._waiting:
            # NCCL's calls come after the one before is done, and so does any work
            # of ours on the stream.
            if not self.comm.poll():
                break
            launch = self._waiting[0]
            if not launch.given:
                self._call(launch)
                launch.given = moved = True
                continue
            end = self._event(timed=launch.start is not None)
            self._seam.cuda.record(end, self.stream)
            launch.end = end
            self._in_flight.append(self._waiting.popleft())
            moved = True
        if not self._in_flight and self._waiting and self._waiting[0].given:
            # NCCL connects the ranks for it: on the device nothing has begun yet.
            _started(self._waiting[0])
        return moved

    def _call(self, launch: Launch) -> None:
        cuda, nccl = self._seam.cuda, self._seam.nccl
        for event in launch.ready:
            cuda.wait(self.stream, event)
        if launch.works[0].timed:
            launch.start = self._event(timed=True)
            cuda.record(launch.start, self.stream)
        if len(launch.calls) == 1:
            launch.calls[0](self.comm.handle, self.stream)
            return
        nccl.group_start()
        try:
            for call in launch.calls:
                call(self.comm.handle, self.stream)
        finally:
            nccl.group_end()

    def _reap(self, over: list[tuple[Launch, float | None]]) -> None:
        """Find what the device has done; the mutex is held."""
        cuda, in_flight = self._seam.cuda, self._in_flight
        done = 0
        for launch in in_flight:
            if not cuda.reached(launch.end):
                if not launch.works[0].started_ns and all(
                    cuda.reached(event) for event in launch.ready
                ):
                    _started(launch)
                break
            done += 1
        if in_flight or self._waiting:
            # Errors of the network and of other ranks come from nowhere else.
            # Asked last: what ended with one has garbage in its arrays.
            self.comm.poll()
        for _ in range(done):
            launch = in_flight.popleft()
            elapsed = None
            if launch.start is not None:
                elapsed = cuda.elapsed_ms(launch.start, launch.end)
            over.append((launch, elapsed))

    def _end(self, launch: Launch, elapsed_ms: float | None) -> None:
        now = time.time_ns()
        for work in launch.works:
            if elapsed_ms is not None:
                work.started_ns = now - int(elapsed_ms * 1e6)
            elif not work.started_ns:
                work.mark_started(now)
            work.mark_completed(completed_ns=now)
        self._forget(launch)

    def _forget(self, launch: Launch) -> None:
        # A stream that was told to wait for an event keeps what it needs of it.
        self._events[False] += launch.ready
        if launch.end is not None:
            self._events[launch.start is not None].append(launch.end)
        if launch.start is not None:
            self._events[True].append(launch.start)
        launch.ready, launch.kept, launch.calls = (), (), ()
        # They hold each other, and the arrays with them.
        for work in launch.works:
            work.launch = None
        launch.works = ()

    def _break(self, error: Exception) -> None:
        """NCCL, CUDA or the making of the communicator failed: so does the group.

        Its abort ends every Work, with this as the reason.
        """
        if not self._retired.is_set():
            self._fail(str(error) or type(error).__name__)

    # -- the making of another communicator out of this one ------------------------

    def lend(self, options: dict[str, Any], *, abort: bool) -> bool:
        """Hold back what is issued, for `Descent`, until `take_back`; say whether.

        Not if the communicator is not well, was made with other `options`, or
        is at something; with `abort`, that is given up.
        """
        comm = self.comm
        if not nonblocking() or options != comm.options:
            return False
        if not comm.mutex.acquire(timeout=MUTEX_WAIT):
            # Its holder is in a call that may only end with it.
            return False
        try:
            well = not self.retired and not self._lent.is_set() and comm.poll()
            if not well or (self.busy and not abort):
                return False
            if abort:
                # What NCCL ends is over, and not well.
                self._retired.set()
            self._lent.set()
            return True
        except DistError:
            return False
        finally:
            comm.mutex.release()

    def take_back(self) -> None:
        """Go on with what was held back."""
        self._lent.clear()

    def fail(self, reason: str) -> None:
        """End it, and its group: the communicator is of no use any more."""
        self._fail(reason)

    # -- waiting -------------------------------------------------------------------

    def wait_for(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Advance until ``done()``, or for `timeout` seconds, or until retired.

        Says whether it is done.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        nap = _NAP
        while not done() and not self.retired:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if not self.advance() and not done():
                time.sleep(nap)
                nap = min(1.3 * nap, _NAP_MAX)
        return done()

    def join(self, launch: Launch) -> None:
        """Make the caller's current streams wait for the end of `launch`."""
        cuda, mutex = self._seam.cuda, self.comm.mutex
        while not mutex.acquire(timeout=_NAP_MAX):
            # Its holder may be in a call that only an abort ends.
            if self.retired:
                return
        try:
            # If it was reaped meanwhile, the event may already be another's.
            if self.retired or launch not in self._in_flight:
                return
            with cuda.device(self.comm.device):
                for stream in cuda.current_streams(self.comm.device):
                    cuda.wait(stream, launch.end)
        finally:
            mutex.release()

    # -- the end ---------------------------------------------------------------------

    def close(self) -> None:
        """Free everything in good order: nothing is in flight."""
        deadline = time.monotonic() + CLOSE_WAIT
        while not self._retire() and time.monotonic() < deadline:
            time.sleep(_NAP_MAX)
        self._retired.set()
        self.comm.close()
        self.free()

    def _retire(self) -> bool:
        """Take nothing more, unless it is lent."""
        with self.comm.mutex:
            if not self._lent.is_set():
                self._retired.set()
        return self.retired

    def free(self) -> None:
        """Free the stream and the events: the device is done with them."""
        cuda = self._seam.cuda
        try:
            with cuda.device(self.comm.device):
                for pool in self._events.values():
                    while pool:
                        cuda.free_event(pool.pop())
                cuda.free_stream(self.stream)
        except DistError as error:
            # The device is lost; so is what was on it.
            _log.debug("%s: %s", self.comm.name, error)


def _started(launch: Launch) -> None:
    for work in launch.works:
        if not work.started_ns:
            work.mark_started()


def abort_queues(queues: Sequence[NCCLQueue]) -> bool:
    """Abort `queues`, all of one device, together; say whether NCCL came back in time.

    What was under way keeps its arrays and events until its kernels have ended.
    """
    for queue in queues:
        queue._retired.set()

    def free() -> None:
        for queue in queues:
            for launch in [*queue._in_flight, *queue._waiting]:
                queue._forget(launch)
            queue._in_flight.clear()
            queue._waiting.clear()
            queue.free()

    return abort_together([queue.comm for queue in queues], free)
