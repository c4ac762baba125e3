"""NCCL's side of a Work: from the call to the end event on the device.

An op goes through three places. It waits in the lane of its device until its
communicator is there and NCCL is done with the call before it; then it is given
to NCCL, on a stream of our own that first waits for what the caller's streams had
been given by then; once NCCL has launched it, an end event is recorded behind it.
The Work is over when that event was reached.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from .errors import DistBackendError, DistError
from .late_errors import caller_knows, note_late_error
from .nccl_comm import (
    CLOSE_WAIT,
    MUTEX_WAIT,
    CommState,
    NCCLComm,
    abort_together,
    start_thread,
)
from .nccl_lane import Lane
from .nccl_progress import progress
from .nccl_seam import Seam
from .uninterrupted import Uninterrupted
from .work import OpType, Work

__all__ = ["Call", "Launch", "NCCLQueue", "NCCLWork", "abort_queues"]

#: What gives an op to NCCL: ``call(communicator's handle, stream)``.
Call = Callable[[Any, int], None]

_log = logging.getLogger(__name__)

# A waiter looks this often, in seconds: at first often, then less.
_NAP, _NAP_MAX = 1e-5, 5e-4
# An op that is the next to start, and does not, is overdue so much after its timeout
# (ns): what keeps it, the making of its communicator for one, says more if it can.
_GRACE = 1_000_000_000


class NCCLWork(Work):
    """An op on the device.

    ``wait()`` makes the caller's current stream wait for it and returns, as in
    c10d: the host does not wait, and host code sees the result after it has
    synchronized that stream. ``wait(timeout)`` and ``synchronize()`` block
    until the op is over. Each of them raises what became of the op, also when
    that was an abort, after which a stream synchronizes with garbage in the
    arrays.
    """

    __slots__ = ("blocking", "callbacks_later", "launch", "trusted")

    on_device = True

    def __init__(self, op_type: OpType, result: Any = None) -> None:
        super().__init__(op_type, result)
        self.launch: Launch | None = None
        #: Whether wait() blocks the host, too (barrier).
        self.blocking = False
        self.callbacks_later = False
        #: Whether wait() returned, or is about to, although the op was not over.
        self.trusted = False

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        launch = self.launch
        if timeout is not None or self.blocking or launch is None:
            return self._finish(timeout)
        if not self.is_completed():
            launch.join_streams(self)
            self.trusted = True
            # An abort retires the queue before any kernel ends.
            if not launch.queue.over and not self.is_completed():
                return True
        return self._finish(None)

    def synchronize(self) -> None:
        """Block until the op is over; raise its error."""
        self._finish(None)

    def result(self) -> Any:
        """What the op produces: on the caller's stream, once ``wait()`` has returned.

        Raises the Work's error, and `DistBackendError` before ``wait()``.
        """
        if self.trusted and self._exception is None:
            return self._result
        return super().result()

    def _finish(self, timeout: float | timedelta | None) -> bool:
        try:
            return super().wait(timeout)
        finally:
            self._tell()

    def _tell(self) -> None:
        if self._exception is not None and self.record is not None:
            caller_knows(self.record.status)

    def _name_error(self) -> None:
        super()._name_error()
        if self.trusted and self._exception is not None and self.record is not None:
            note_late_error(self.record.status, self._exception)

    def end(self, elapsed_ms: float | None, *, callbacks_later: bool) -> None:
        """Report success, and that it took so long on the device, if that is known."""
        now = time.time_ns()
        self.callbacks_later = callbacks_later
        if elapsed_ms is not None:
            self.started_ns = now - int(elapsed_ms * 1e6)
        elif not self.started_ns:
            self.mark_started(now)
        self.mark_completed(completed_ns=now)

    def _call_back(self, callbacks: Sequence[Callable[[Work], None]]) -> None:
        run = partial(super()._call_back, callbacks)
        if self.callbacks_later:
            progress.call(run)
        else:
            run()

    def begun_ns(self, oldest: bool) -> int:
        if self.started_ns:
            return self.started_ns
        launch = self.launch
        if launch is not None and launch.next_ns:
            return launch.next_ns + _GRACE
        stuck = progress.stuck_for()
        return max(self.scheduled_ns, time.time_ns() - int(stuck * 1e9)) if stuck else 0

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

    __slots__ = (
        *("calls", "end", "given", "kept", "next_ns", "queue"),
        *("ready", "start", "works"),
    )

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
        #: Since when it is the next of its device that could begin, ``time_ns``.
        self.next_ns = 0
        for work in works:
            work.launch = self

    def started(self) -> None:
        """Note that its Works have begun."""
        for work in self.works:
            if not work.started_ns:
                work.mark_started()

    def join_streams(self, work: NCCLWork) -> None:
        """Make the caller's current streams wait for the end of this, of `work`.

        Blocks only until NCCL has launched it.
        """
        queue = self.queue
        queue.wait_for(lambda: self.end is not None or work.is_completed(), None)
        if not work.is_completed():
            queue.join(self)


class NCCLQueue:
    """The ops of one group on one device of this rank, in order of issue.

    What is not public is for the holder of the lane's lock.
    """

    def __init__(
        self, seam: Seam, lane: Lane, comm: NCCLComm, fail: Callable[[str], None]
    ) -> None:
        self.comm, self.lane = comm, lane
        self._seam, self._fail = seam, fail
        # Whether callers give NCCL their ops: a blocking call may not come back.
        self._inline = comm.nonblocking
        with seam.cuda.device(comm.device):
            self.stream = seam.cuda.new_stream()
        self.in_flight: collections.deque[Launch] = collections.deque()
        #: Set when NCCL, CUDA or the making of the communicator failed.
        self.broken = False
        self._dropped: list[Launch] = []
        self._events: dict[bool, list[Any]] = {True: [], False: []}
        comm.on_error = self.break_
        self._retired = threading.Event()
        self._lent = threading.Event()
        self._freed = False
        progress.open(lane)

    @property
    def retired(self) -> bool:
        """Whether it was aborted or closed: what is not over will not be well."""
        return self._retired.is_set()

    @property
    def over(self) -> bool:
        """Whether it is retired, or about to be."""
        return self.broken or self._retired.is_set()

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self.in_flight or self.lane.waiting(self))

    @property
    def launched(self) -> bool:
        """Whether NCCL has something of it to do."""
        if self.in_flight:
            return True
        return any(one.given for one in self.lane.waiting(self))

    # -- in ----------------------------------------------------------------------

    def submit(
        self, works: Sequence[NCCLWork], calls: Sequence[Call], kept: Sequence[Any]
    ) -> None:
        """Issue an op, or a batch as one; `kept` is what it reads and writes."""
        cuda, lane = self._seam.cuda, self.lane
        with Uninterrupted(), cuda.device(self.comm.device):
            ready: list[Any] = []
            try:
                for stream in cuda.current_streams(self.comm.device):
                    if cuda.capturing(stream):
                        raise DistBackendError(
                            "a CUDA graph is being captured on the current stream; "
                            "the nccl backend cannot be captured: issue the op "
                            "before or after it"
                        )
                    ready.append(self._event(timed=False))
                    cuda.record(ready[-1], stream)
                launch = Launch(self, works, calls, kept, ready)
                if not lane.put(launch):
                    raise DistBackendError(
                        f"{self.comm.name} was {self.comm.state.value}"
                    )
            except BaseException:
                for work in works:
                    work.launch = None
                self._recycle(ready, timed=False)
                raise
            if self._inline:
                lane.advance(issuing=True)
            lane.watch()

    def _event(self, *, timed: bool) -> Any:
        try:
            return self._events[timed].pop()
        except IndexError:
            return self._seam.cuda.new_event(timed=timed)

    # -- forward: called by the lane, which holds its lock ---------------------------

    def give(self, launch: Launch) -> bool:
        """Give `launch` to NCCL; say whether NCCL has launched it on the device."""
        if self._lent.is_set():
            return False
        # NCCL's calls come after the one before is done, and so does any work
        # of ours on the stream.
        done = self.comm.poll()
        if self.comm.state is CommState.RUNNING and not launch.next_ns:
            launch.next_ns = time.time_ns()
        if done and not launch.given:
            launch.given = True
            self._call(launch)
            done = self.comm.poll()
        if not done:
            if launch.given and not self.in_flight:
                # NCCL connects the ranks: on the device nothing has begun yet.
                launch.started()
            return False
        if self.in_flight or not self._is_ready(launch):
            # What comes before it on the device takes its time: no fault of its own.
            launch.next_ns = 0
        launch.end = self._event(timed=launch.start is not None)
        self._seam.cuda.record(launch.end, self.stream)
        self.in_flight.append(launch)
        return True

    def _is_ready(self, launch: Launch) -> bool:
        return all(self._seam.cuda.reached(event) for event in launch.ready)

    def _call(self, launch: Launch) -> None:
        cuda, nccl, handle = self._seam.cuda, self._seam.nccl, self.comm.handle
        for event in launch.ready:
            cuda.wait(self.stream, event)
        if launch.works[0].timed:
            launch.start = self._event(timed=True)
            cuda.record(launch.start, self.stream)
        if len(launch.calls) == 1:
            launch.calls[0](handle, self.stream)
            return
        nccl.group_start()
        try:
            for call in launch.calls:
                call(handle, self.stream)
        finally:
            nccl.group_end()

    def reap(self) -> list[tuple[list[NCCLWork], float | None]]:
        """Take out what the device has done: the Works, and how long they took."""
        cuda, in_flight = self._seam.cuda, self.in_flight
        done = 0
        for launch in in_flight:
            if not cuda.reached(launch.end):
                if not launch.works[0].started_ns and self._is_ready(launch):
                    launch.started()
                break
            done += 1
        # Errors of the network and of other ranks come from nowhere else.
        # Asked last: what ended with one has garbage in its arrays.
        self.comm.poll()
        over = []
        for _ in range(done):
            launch, elapsed = in_flight[0], None
            if launch.start is not None:
                elapsed = cuda.elapsed_ms(launch.start, launch.end)
            in_flight.popleft()
            over.append((list(launch.works), elapsed))
            self._forget(launch)
        return over

    def drop(self, launch: Launch) -> None:
        """Keep what will not come, and may be under way, until the abort is done."""
        if self._freed:
            self._forget(launch)
        else:
            self._dropped.append(launch)

    def _forget(self, launch: Launch) -> None:
        # A stream that was told to wait for an event keeps what it needs of it.
        timed = launch.start is not None
        self._recycle(launch.ready, timed=False)
        self._recycle([one for one in (launch.start, launch.end) if one], timed=timed)
        launch.ready, launch.kept, launch.calls = (), (), ()
        # They hold each other, and the arrays with them.
        for work in launch.works:
            work.launch = None
        launch.works = ()

    def _recycle(self, events: Sequence[Any], *, timed: bool) -> None:
        self._events[timed] += events
        if self._freed:
            self._free_events()

    def _free_events(self) -> None:
        for pool in self._events.values():
            while pool:
                self._seam.cuda.free_event(pool.pop())

    def break_(self, error: Exception) -> None:
        """NCCL, CUDA or the making of the communicator failed: so does the group.

        Its abort ends every Work, with this as the reason. Returns at once.
        """
        self.broken = True
        if not self.retired:
            self.fail(str(error) or type(error).__name__)

    def fail(self, reason: str) -> None:
        """End it, and its group: the communicator is of no use any more."""
        start_thread(f"rankscope-failed-{self.comm.name}", lambda: self._fail(reason))

    # -- the making of another communicator out of this one ------------------------

    def lend(self, options: dict[str, Any], *, abort: bool) -> bool:
        """Hold back what is issued, for `Descent`, until `take_back`; say whether.

        Not if the communicator is not well, was made with other `options`, or
        is at something; with `abort`, that is given up.
        """
        comm = self.comm
        if not self._inline or options != comm.options:
            return False
        with comm.locked(MUTEX_WAIT) as held:
            # If not, its holder is in a call that may only end with it.
            if not held or self.over or self._lent.is_set():
                return False
            with contextlib.suppress(DistError):
                if comm.poll() and (abort or not self.busy):
                    if abort:
                        # What NCCL ends is over, and not well.
                        self._retired.set()
                    self._lent.set()
            return self._lent.is_set()

    def take_back(self) -> None:
        """Go on with what was held back."""
        self._lent.clear()

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
            moved = self._inline and self.lane.advance()
            if not moved and not done():
                time.sleep(nap)
                nap = min(1.3 * nap, _NAP_MAX)
        return done()

    def join(self, launch: Launch) -> None:
        """Make the caller's current streams wait for the end of `launch`."""
        cuda, lock = self._seam.cuda, self.lane.lock
        while not self.retired:
            with Uninterrupted():
                # The lock's holder may be in a call that only an abort ends.
                if not lock.acquire(timeout=_NAP_MAX):
                    continue
                try:
                    # If it was reaped meanwhile, the event may already be another's.
                    if not self.retired and launch.works:
                        with cuda.device(self.comm.device):
                            for stream in cuda.current_streams(self.comm.device):
                                cuda.wait(stream, launch.end)
                    return
                finally:
                    lock.release()

    # -- the end ---------------------------------------------------------------------

    def close(self) -> None:
        """Free everything in good order: nothing is in flight."""
        deadline = time.monotonic() + CLOSE_WAIT
        while self._lent.is_set() and time.monotonic() < deadline:
            time.sleep(_NAP_MAX)
        self._retired.set()
        self.comm.close()
        self.free()

    def retire(self) -> None:
        """Take nothing more: what is under way will be aborted."""
        self._retired.set()

    def free(self) -> None:
        """Free what it holds, stream and events: the device is done with them."""
        cuda = self._seam.cuda
        progress.close(self.lane)
        with Uninterrupted(), self.comm.locked(CLOSE_WAIT) as held:
            if not held:
                _log.warning(
                    "%s: a call of NCCL or CUDA has not come back; what it holds on "
                    "the GPU stays taken until a restart of this rank (%%dist_restart)",
                    self.comm.name,
                )
                return
            left = [*self.in_flight, *self._dropped, *self.lane.sweep(self)]
            self.in_flight.clear()
            self._dropped.clear()
            try:
                for launch in left:
                    self._forget(launch)
                with cuda.device(self.comm.device):
                    self._freed = True
                    self._free_events()
                    cuda.free_stream(self.stream)
            except DistError as error:
                # The device is lost; so is what was on it.
                _log.debug("%s: %s", self.comm.name, error)


def abort_queues(queues: Sequence[NCCLQueue]) -> bool:
    """Abort `queues`, all of one device, together; say whether NCCL came back in time.

    What was under way keeps its arrays and events until its kernels have ended.
    """
    for queue in queues:
        # What is over by now went well, and its caller may know that from its stream.
        if not progress.stuck_for():
            queue.lane.advance(issuing=True)
        queue.retire()

    def free() -> None:
        for queue in queues:
            queue.free()

    return abort_together([queue.comm for queue in queues], free)
