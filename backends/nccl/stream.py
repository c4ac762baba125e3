"""NCCLStream: the ops of one group on one device, from their issue to their end."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..errors import ConnectionLostError, DistBackendError, DistError
from ..thread_start import start_or_run
from ..work.sigint import defer_sigint
from .communicator import (
    CLOSE_WAIT,
    MUTEX_WAIT,
    REVOKE_WAIT,
    CommState,
    NCCLComm,
    abort_together,
)
from .interface import GpuApi
from .launch_queue import Completed, DeviceQueue
from .progress import LOOK_WAIT, progress
from .stream_state import StreamEvent, StreamState, transition
from .work import Call, Launch, NCCLWork

__all__ = ["NCCLStream", "abort_streams"]

_log = logging.getLogger(__name__)

# Seconds between two looks of a waiter: at first often, then less.
_NAP, _NAP_MAX = 1e-5, 5e-4


class NCCLStream:
    """The communicator of one group on one device, and a CUDA stream for its ops.

    `fail` aborts the group, or has it look for the cause of a lost connection first.
    The `DeviceQueue` calls `try_launch`, `collect_completed` and `discard` with its
    lock held.
    """

    def __init__(
        self,
        api: GpuApi,
        queue: DeviceQueue,
        comm: NCCLComm,
        fail: Callable[[str | DistError], None],
        *,
        high_priority: bool = False,
    ) -> None:
        self.comm, self.queue = comm, queue
        self._api, self._fail = api, fail
        # Whether callers issue their ops to NCCL: a blocking call may not return.
        self._callers_advance = comm.nonblocking
        with api.cuda.device(comm.device):
            self.cuda_stream = api.cuda.new_stream(high_priority=high_priority)
        self.in_flight: collections.deque[Launch] = collections.deque()
        # Launches that will not be launched, but may be half-way: kept for the abort.
        self._discarded: list[Launch] = []
        self._free_events: dict[bool, list[Any]] = {True: [], False: []}
        # That of the last op that has ended, if it is timed.
        self._last_end: Any = None
        self.state = StreamState.OPEN
        self._state_lock = threading.Lock()
        self._failure: Exception | None = None
        comm.on_error = self._on_comm_error
        progress.open(queue)

    # -- state -------------------------------------------------------------------

    def _apply(self, event: StreamEvent) -> bool:
        """Change the state as `event` requires; return whether it changed."""
        with self._state_lock:
            before, after = self.state, transition(self.state, event)
            self.state = after
        return after is not before

    @property
    def accepts(self) -> bool:
        return self.state.accepts

    @property
    def healthy(self) -> bool:
        return self.state.healthy

    @property
    def busy(self) -> bool:
        """Whether any op is pending or in flight."""
        return bool(self.in_flight or self.queue.pending(self))

    @property
    def in_nccl(self) -> bool:
        """Whether NCCL was called for an op that has not ended."""
        if self.in_flight:
            return True
        return any(launch.issued for launch in self.queue.pending(self))

    def describe(self) -> str:
        suspended = self.state is StreamState.SUSPENDED
        return "suspended" if suspended else self.comm.describe()

    # -- submission --------------------------------------------------------------

    def submit(
        self, works: Sequence[NCCLWork], calls: Sequence[Call], arrays: Sequence[Any]
    ) -> None:
        """Issue an op, or a batch as one, behind the caller's current streams."""
        cuda, queue = self._api.cuda, self.queue
        with defer_sigint(), cuda.device(self.comm.device):
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
                launch = Launch(self, works, calls, arrays, ready)
                if not queue.put(self, launch):
                    raise DistBackendError(
                        f"{self.comm.name} was {self.comm.state.value}"
                    )
            except BaseException:
                for work in works:
                    work.launch = None
                self._recycle(ready, timed=False)
                raise
            if self._callers_advance:
                queue.advance_in_submit()
            queue.watch()

    def _event(self, *, timed: bool) -> Any:
        try:
            return self._free_events[timed].pop()
        except IndexError:
            return self._api.cuda.new_event(timed=timed)

    # -- launch and completion: the lock of the queue is held ----------------------

    def try_launch(self, launch: Launch) -> bool:
        """Issue `launch` to NCCL; return whether NCCL has launched it."""
        if self.state is not StreamState.OPEN:
            if self.state is StreamState.RESERVED:
                self._count_held_back(launch)
            return False
        # NCCL has to be done with the call before, which may still add to the CUDA
        # stream, before anything follows.
        done = self.comm.poll()
        if self.comm.state is CommState.RUNNING and launch.runnable_since is None:
            launch.runnable_since = time.monotonic()
        if done and not launch.issued:
            launch.issued = True
            self._issue(launch)
            done = self.comm.poll()
        if not done:
            if launch.issued and not self.in_flight:
                # NCCL connects the ranks: the op runs, though not on the device yet.
                launch.mark_started()
            return False
        if self.in_flight or not self._is_ready(launch):
            # The op waits for what precedes it on the device, which has a timeout of
            # its own, or is the caller's.
            launch.runnable_since = None
        launch.end_event = self._event(timed=launch.start_event is not None)
        self._api.cuda.record(launch.end_event, self.cuda_stream)
        self.in_flight.append(launch)
        return True

    def _count_held_back(self, launch: Launch) -> None:
        """Count the time of an op that waits for a split, up to its own timeout.

        The split ends with a timeout, too, but that of another group: it may be longer.
        """
        if not self._is_ready(launch):
            launch.runnable_since = None
        elif launch.runnable_since is None:
            launch.runnable_since = time.monotonic()

    def _is_ready(self, launch: Launch) -> bool:
        return all(self._api.cuda.reached(event) for event in launch.ready_events)

    def _issue(self, launch: Launch) -> None:
        cuda, nccl, handle = self._api.cuda, self._api.nccl, self.comm.handle
        for event in launch.ready_events:
            cuda.wait(self.cuda_stream, event)
        if launch.works[0].timed:
            launch.start_event = self._event(timed=True)
            cuda.record(launch.start_event, self.cuda_stream)
        if len(launch.calls) == 1:
            launch.calls[0](handle, self.cuda_stream)
            return
        nccl.group_start()
        try:
            for call in launch.calls:
                call(handle, self.cuda_stream)
        finally:
            nccl.group_end()

    def collect_completed(self) -> list[Completed]:
        """Remove what the device has finished from `in_flight`, and return it."""
        cuda, in_flight = self._api.cuda, self.in_flight
        done = 0
        for launch in in_flight:
            if not cuda.reached(launch.end_event):
                if not launch.works[0].started_ns and self._is_ready(launch):
                    launch.mark_started()
                break
            done += 1
        # The only source of errors of the network and of other ranks. After the
        # events: an op that ended because of such an error has garbage in its arrays.
        self.comm.poll()
        completed: list[Completed] = []
        for _ in range(done):
            launch, elapsed, since = in_flight[0], None, None
            if launch.start_event is not None:
                elapsed = cuda.elapsed_ms(launch.start_event, launch.end_event)
                if self._last_end is not None:
                    since = cuda.elapsed_ms(self._last_end, launch.start_event)
            in_flight.popleft()
            completed.append((list(launch.works), elapsed, since))
            self._keep_end(launch)
            self._forget(launch)
        return completed

    def _keep_end(self, launch: Launch | None) -> None:
        """Keep the end of `launch` in the place of that of the op before."""
        if self._last_end is not None:
            self._recycle([self._last_end], timed=True)
            self._last_end = None
        if launch is not None and launch.start_event is not None:
            self._last_end, launch.end_event = launch.end_event, None

    def discard(self, launch: Launch) -> None:
        """Keep `launch`, which may be half issued, until the abort is done."""
        if self.state is StreamState.FREED:
            self._forget(launch)
        else:
            self._discarded.append(launch)

    def _forget(self, launch: Launch) -> None:
        # A CUDA stream that was made to wait for an event keeps what it needs of it.
        timed = launch.start_event is not None
        ends = [one for one in (launch.start_event, launch.end_event) if one]
        self._recycle(launch.ready_events, timed=False)
        self._recycle(ends, timed=timed)
        launch.ready_events, launch.arrays, launch.calls = (), (), ()
        # A Work and its launch refer to each other; the cycle would keep the arrays.
        for work in launch.works:
            work.launch = None
        launch.works = ()

    def _recycle(self, events: Sequence[Any], *, timed: bool) -> None:
        self._free_events[timed] += events
        if self.state is StreamState.FREED:
            self._destroy_events()

    def _destroy_events(self) -> None:
        for pool in self._free_events.values():
            while pool:
                self._api.cuda.free_event(pool.pop())

    # -- failure -------------------------------------------------------------------

    def mark_broken(self, error: Exception) -> None:
        """Launch nothing any more: NCCL, CUDA or the communicator failed."""
        if self._apply(StreamEvent.FAIL):
            self._failure = error

    def report_failure(self) -> None:
        """Have the group aborted, if the stream is broken. Returns at once."""
        error = self._failure
        if self.state is not StreamState.BROKEN or error is None:
            return
        if isinstance(error, ConnectionLostError) and self.comm.size > 1:
            self.abort_group(error)
        else:
            self.abort_group(str(error) or type(error).__name__)

    def _on_comm_error(self, error: Exception) -> None:
        self.mark_broken(error)
        self.report_failure()

    def abort_group(self, reason: str | DistError) -> None:
        """Have the group aborted, on another thread."""
        start_or_run(f"failed-{self.comm.name}", lambda: self._fail(reason))

    # -- reservation for ncclCommSplit and ncclCommShrink ----------------------------

    def reserve(self, options: dict[str, Any], *, abort: bool) -> bool:
        """Hold back ops until `release`, for a split; return whether it is possible."""
        comm = self.comm
        if not self._callers_advance or options != comm.options:
            return False
        with comm.locked(MUTEX_WAIT) as held:
            # If not, its holder is in a call that may end with an abort only.
            if not held or self.state is not StreamState.OPEN:
                return False
            with contextlib.suppress(DistError):
                if comm.poll() and (abort or not self.busy):
                    event = StreamEvent.SHRINK if abort else StreamEvent.RESERVE
                    return self._apply(event)
            return False

    def release(self) -> None:
        """End the reservation: launch what was held back."""
        self._apply(StreamEvent.RELEASE)

    # -- suspension --------------------------------------------------------------------

    def suspend(self) -> bool:
        """Accept no ops until `resume`; return whether that is possible now."""
        with self.comm.locked(MUTEX_WAIT) as held:
            if not held or not self.comm.poll() or self.busy:
                return False
            return self._apply(StreamEvent.SUSPEND)

    def resume(self) -> None:
        self._apply(StreamEvent.RESUME)

    # -- waiting -------------------------------------------------------------------

    def wait_for(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Advance until ``done()``, for `timeout` seconds, or until the end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        nap = _NAP
        while not done() and self.accepts:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            moved = self._callers_advance and self.queue.advance()
            if not moved and not done():
                time.sleep(nap)
                nap = min(1.3 * nap, _NAP_MAX)
        return done()

    def join(self, launch: Launch, done: Callable[[], bool]) -> None:
        """Make the caller's current streams wait for the end of `launch`.

        Blocks only until NCCL has launched it. ``done()`` says whether it has ended:
        then there is nothing to wait for.
        """
        self.wait_for(lambda: launch.end_event is not None or done(), None)
        cuda, lock = self._api.cuda, self.queue.lock
        while self.accepts and not done():
            with defer_sigint():
                # The lock's holder may be in a call that only an abort ends.
                if not lock.acquire(timeout=_NAP_MAX):
                    continue
                try:
                    # Once it is collected, the event may belong to another launch.
                    if self.accepts and launch.works:
                        with cuda.device(self.comm.device):
                            for stream in cuda.current_streams(self.comm.device):
                                cuda.wait(stream, launch.end_event)
                    return
                finally:
                    lock.release()

    # -- the end ---------------------------------------------------------------------

    def close(self) -> None:
        """Free everything in good order: nothing is in flight."""
        deadline = time.monotonic() + CLOSE_WAIT
        reserved = (StreamState.RESERVED, StreamState.SHRINKING)
        while self.state in reserved and time.monotonic() < deadline:
            time.sleep(_NAP_MAX)
        self.close_submission()
        self.comm.close()
        self.free()

    def close_submission(self) -> None:
        """Accept no more ops: those in flight will be aborted."""
        self._apply(StreamEvent.CLOSE)

    def use_device(self) -> None:
        """Make the device that of the calling thread, which is the backend's."""
        with contextlib.suppress(DistError):
            # A lost device: `free` reports it.
            self._api.cuda.use(self.comm.device)

    def free(self) -> None:
        """Free the CUDA stream and the events: the device is done with them."""
        cuda = self._api.cuda
        progress.close(self.queue)
        with defer_sigint(), self.comm.locked(CLOSE_WAIT) as held:
            if not held:
                _log.warning(
                    "%s: a call of NCCL or CUDA has not returned; what it holds on "
                    "the GPU stays taken until a restart of this rank (%%dist_restart)",
                    self.comm.name,
                )
                return
            left = [*self.in_flight, *self._discarded, *self.queue.remove_all(self)]
            self.in_flight.clear()
            self._discarded.clear()
            try:
                for launch in left:
                    self._forget(launch)
                with cuda.device(self.comm.device):
                    self._keep_end(None)
                    self._apply(StreamEvent.FREE)
                    self._destroy_events()
                    cuda.free_stream(self.cuda_stream)
            except DistError as error:
                # The device is lost, and what was on it.
                _log.debug("%s: %s", self.comm.name, error)


def abort_streams(
    streams: Sequence[NCCLStream], reason: str, abort_beside: Callable[[set[int]], None]
) -> bool:
    """Abort `streams`, all of one device; return whether NCCL returned in time.

    ``abort_beside(devices)`` aborts the other groups that have work in flight where
    ncclCommRevoke did not end the kernels: an abort may block behind those groups'.
    """
    # An op that has ended by now went well; its caller may know from its stream. The
    # progress thread looks: here, a call of CUDA could block before the abort, or break
    # the capture of a CUDA graph.
    if any(stream.busy for stream in streams) and not progress.stuck_for():
        progress.poll(LOOK_WAIT)
    hanging = [stream for stream in streams if stream.in_nccl]
    # NCCL itself ends what is in flight on the communicator that is being shrunk.
    shrinking = {one for one in hanging if one.state is StreamState.SHRINKING}
    for stream in streams:
        # Before the kernels end: an op that is ended has garbage in its arrays.
        stream.close_submission()
    ended = _revoke([one for one in hanging if one not in shrinking])
    abort_beside({one.comm.device for one in hanging if one not in ended})

    def free() -> None:
        # On the thread of the abort.
        for stream in streams:
            stream.use_device()
            stream.free()

    return abort_together([stream.comm for stream in streams], reason, free)


def _revoke(streams: Sequence[NCCLStream]) -> set[NCCLStream]:
    """End the kernels of `streams` by ncclCommRevoke; return those that have ended."""
    ended: set[NCCLStream] = set()

    def revoke(stream: NCCLStream) -> None:
        if stream.comm.revoke():
            ended.add(stream)

    deadline = time.monotonic() + MUTEX_WAIT + REVOKE_WAIT
    threads = [
        start_or_run(f"revoke-{one.comm.name}", partial(revoke, one)) for one in streams
    ]
    for thread in threads:
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
    return set(ended)
