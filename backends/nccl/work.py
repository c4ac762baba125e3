"""NCCLWork and Launch: an op on the device, and the unit in which NCCL gets ops.

An op waits in the `DeviceQueue` until its communicator is ready and NCCL has
finished the call before it. It is then issued to NCCL on a CUDA stream of the
group, which first waits for the caller's streams; once NCCL has launched it, an
end event is recorded behind it. The Work completes when that event is reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from ..work.async_errors import acknowledge, record_async_error
from ..work.op_type import OpType
from ..work.work import Work
from .progress import LOOK_WAIT, progress

__all__ = ["Call", "Launch", "NCCLWork"]

#: What issues an op to NCCL: ``call(communicator's handle, stream)``.
Call = Callable[[Any, int], None]

# An op at the head of the queue that does not start is overdue so many seconds after
# its timeout: what delays it, such as the creation of its communicator, may end with
# an error that says more.
_GRACE = 1.0


class IssuingStream(Protocol):
    """What a Work uses of the stream that it was issued on, an `NCCLStream`."""

    @property
    def healthy(self) -> bool: ...
    def wait_for(self, done: Callable[[], bool], timeout: float | None) -> bool: ...
    def join(self, launch: Launch, done: Callable[[], bool]) -> None: ...


class NCCLWork(Work):
    """An op on the device.

    ``wait()`` makes the caller's current stream wait for the op and returns, as in
    c10d: the host does not wait, and host code sees the result after it has
    synchronized that stream. ``wait(timeout)`` and ``synchronize()`` block
    until the op has ended. All of them raise the op's error. After an abort, a
    stream that waits for the op goes on, with garbage in the arrays.
    """

    __slots__ = ("blocking", "callbacks_later", "device_ns", "launch", "returned_early")

    on_device = True

    def __init__(self, op_type: OpType, result: Any = None) -> None:
        super().__init__(op_type, result)
        self.launch: Launch | None = None
        #: Whether wait() blocks the host, too (barrier).
        self.blocking = False
        self.callbacks_later = False
        self.device_ns: tuple[int, int] | None = None
        #: Whether wait() returned, or is about to, before the op had ended.
        self.returned_early = False

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        launch = self.launch
        if timeout is not None or self.blocking or launch is None:
            return self._finish(timeout)
        self._note_waited()
        if not self._state.is_terminal:
            launch.stream.join(launch, self.is_completed)
            self.returned_early = True
            # An abort closes the stream before any kernel ends.
            if launch.stream.healthy and not self._state.is_terminal:
                return True
        return self._finish(None)

    def synchronize(self) -> None:
        """Block until the op has ended; raise its error."""
        self._finish(None)

    def result(self) -> Any:
        """Return the op's result: valid on the caller's stream after ``wait()``."""
        if self.returned_early and self._exception is None:
            return self._outputs()
        return super().result()

    def _finish(self, timeout: float | timedelta | None) -> bool:
        try:
            return super().wait(timeout)
        finally:
            self._mark_observed()

    def _mark_observed(self) -> None:
        if self._exception is not None and self.record is not None:
            acknowledge(self.record.status)

    def _name_error(self) -> None:
        super()._name_error()
        error = self._exception
        if self.returned_early and error is not None and self.record is not None:
            record_async_error(self.record.status, error)

    def end(
        self,
        elapsed_ms: float | None,
        since_ms: float | None = None,
        *,
        callbacks_later: bool,
    ) -> None:
        """Report success; `elapsed_ms` is the time on the device, if it is known.

        `since_ms` is that from the end of the group's op before to the start of this.
        With `callbacks_later`, callbacks run on the progress thread.
        """
        now = time.time_ns()
        self.callbacks_later = callbacks_later
        if elapsed_ms is not None:
            self.started_ns = now - int(elapsed_ms * 1e6)
            if since_ms is not None:
                self.device_ns = int(since_ms * 1e6), int(elapsed_ms * 1e6)
        elif not self.started_ns:
            self.mark_started(now)
        self.mark_completed(completed_ns=now)

    def _call_back(self, callbacks: Iterable[Callable[[Work], None]]) -> None:
        run = partial(super()._call_back, callbacks)
        if self.callbacks_later:
            progress.call(run)
        else:
            run()

    def poll(self) -> bool:
        # The device may have finished the op while no thread could look: code of the
        # user's that keeps the GIL delays the progress thread and the watchdog alike.
        if not self._state.is_terminal:
            progress.poll(LOOK_WAIT)
        return self._state.is_terminal

    def begun_at(self, oldest: bool) -> float | None:
        if self.started_ns:
            return self.since
        launch = self.launch
        if launch is not None and launch.runnable_since is not None:
            return launch.runnable_since + _GRACE
        stuck = progress.stuck_for()
        return max(self.since, time.monotonic() - stuck) if stuck else None

    def _block(self, timeout: float | None) -> bool:
        launch = self.launch
        deadline = None if timeout is None else time.monotonic() + timeout
        if launch is not None and launch.stream.wait_for(self.is_completed, timeout):
            return True
        # An abort of the stream ends the Work a moment later.
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return super()._block(left)


@dataclass(slots=True, eq=False)
class Launch:
    """What is issued to NCCL at once: one op, or a batch within one NCCL group."""

    stream: IssuingStream
    works: Sequence[NCCLWork]
    calls: Sequence[Call]
    #: Arrays that are referenced until the op has ended: their memory pool would hand
    #: out their memory again without regard to the group's stream.
    arrays: Sequence[Any]
    #: Events of the caller's streams that the op waits for.
    ready_events: Sequence[Any]
    start_event: Any = None
    end_event: Any = None
    #: Whether NCCL was called, though it may not have launched the op yet.
    issued: bool = False
    #: Since when the op is at the head of its device's queue and could start, as
    #: ``time.monotonic``; ``None`` if it is not, or could not.
    runnable_since: float | None = None

    def __post_init__(self) -> None:
        for work in self.works:
            work.launch = self

    def mark_started(self) -> None:
        for work in self.works:
            if not work.started_ns:
                work.mark_started()
