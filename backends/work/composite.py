"""Works made of other Works, of a future, of a call, or of what is over already."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ..errors import DistBackendError
from .op_type import OpType
from .state import WorkState
from .work import Work

__all__ = [
    "chain",
    "completed_work",
    "create_work_from_call",
    "create_work_from_future",
    "join",
]


class _Composite(Work):
    """A Work that starts, advances and is aborted with its parts."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Work], op_type: OpType, result: Any) -> None:
        super().__init__(op_type, result)
        self.parts = parts
        for part in parts:
            part._outer = self
            if part.started_ns:
                self.mark_started(part.started_ns)

    def _block(self, timeout: float | None) -> bool:
        # Waiting for a part may be what drives its progress. The parts' callbacks,
        # which end this Work, may still be running when the parts have ended.
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self.parts:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not part.state.is_terminal and not part._block(left):
                return False
        self._follow_parts()
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return super()._block(left)

    def _follow_parts(self, ended: Work | None = None) -> None:
        """Do what a callback of a part may not have done, as an interrupt ended it."""

    def _note_wait(self) -> None:
        for part in self.parts:
            if not part.state.is_terminal:
                part._note_wait()
        super()._note_wait()

    def _note_unseen(self) -> None:
        for part in self.parts:
            if not part.state.is_terminal:
                part._note_unseen()
        super()._note_unseen()

    def poll(self) -> bool:
        for part in self.parts:
            part.poll()
        return super().poll()

    def detach(self) -> None:
        for part in self.parts:
            part.detach()

    def mark_failed(
        self, error: BaseException, state: WorkState = WorkState.FAILED
    ) -> bool:
        ended = super().mark_failed(error, state)
        # A thread that waits for this Work is blocked in one of the parts.
        for part in self.parts:
            part.mark_failed(error, state)
        return ended


def chain(
    inner: Work, op_type: OpType, then: Callable[[], None], result: Any = None
) -> Work:
    """Return a Work that runs `then` after `inner` went well, and then ends."""
    outer = _Composite([inner], op_type, result)

    def follow(done: Work) -> None:
        error = done._exception
        if error is not None:
            outer.mark_failed(error, done.state)
            return
        try:
            then()
        except BaseException as raised:
            outer.mark_failed(raised)
            if not isinstance(raised, Exception):
                raise  # an interrupt, of the thread as well
        else:
            said = done._result if result is None else result
            outer.mark_completed(said, started_ns=done.started_ns)

    inner._when_over(follow)
    return outer


class _Joined(_Composite):
    """Several Works as one, with nothing to do after them."""

    __slots__ = ("_over",)

    def __init__(self, parts: Sequence[Work], op_type: OpType, result: Any) -> None:
        super().__init__(parts, op_type, result)
        # So many of the first parts have ended, at least.
        self._over = 0

    def _follow_parts(self, ended: Work | None = None) -> None:
        """End when all parts have, or as `ended`, a part, has failed."""
        if ended is None or ended._exception is None:
            over = self._over
            while over < len(self.parts) and self.parts[over].state.is_terminal:
                over += 1
            self._over = over
            if over < len(self.parts):
                return
            failed = (part for part in self.parts if part._exception is not None)
            ended = next(failed, None)
        if ended is None or ended._exception is None:
            self.mark_completed()
        else:
            self.mark_failed(ended._exception, ended.state)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        if timeout is None and all(part.on_device for part in self.parts):
            return all([part.wait() for part in self.parts])
        return super().wait(timeout)

    def synchronize(self) -> None:
        # wait() of a part on a device would not block the host.
        for part in self.parts:
            part.synchronize()
        super().wait()


def join(parts: Sequence[Work], op_type: OpType, result: Any = None) -> Work:
    """Return a Work that is over when all of `parts` are, or one fails."""
    outer = _Joined(parts, op_type, result)
    for part in parts:
        part._when_over(outer._follow_parts)
    outer._follow_parts()
    return outer


def completed_work(op_type: OpType, result: Any = None) -> Work:
    """Return the Work of an op that has nothing to wait for."""
    work = Work(op_type, result)
    work.mark_started()
    work.mark_completed()
    return work


def create_work_from_future(
    future: concurrent.futures.Future[Any], op_type: OpType = OpType.UNKNOWN
) -> Work:
    """Return a Work that ends as `future` does, with the future's result.

    For process groups and backends written in plain Python. The op counts as started
    now: for one that may have to queue for its thread there is `create_work_from_call`.

    Named after ``torch.distributed._create_work_from_future``.

    Parameters
    ----------
    future : concurrent.futures.Future
        What the op is; a future that is cancelled aborts the Work.
    op_type : OpType, default UNKNOWN
        The op, in messages and in the Flight Recorder.

    Examples
    --------
    >>> import concurrent.futures
    >>> future = concurrent.futures.Future()
    >>> work = dist.create_work_from_future(future)
    >>> work.state.is_terminal
    False
    >>> future.set_result(3)
    >>> work.wait(), work.result()
    (True, 3)
    """
    work = Work(op_type)
    work.mark_started()

    def settle(done: concurrent.futures.Future[Any]) -> None:
        if done.cancelled():
            work.mark_failed(
                DistBackendError(f"the future of {work.describe()} was cancelled"),
                WorkState.ABORTED,
            )
            return
        error = done.exception()
        if error is None:
            work.mark_completed(done.result())
        else:
            work.mark_failed(error)

    future.add_done_callback(settle)
    return work


def create_work_from_call(
    executor: concurrent.futures.Executor,
    function: Callable[..., Any],
    *args: Any,
    op_type: OpType = OpType.UNKNOWN,
) -> Work:
    """Run ``function(*args)`` on `executor`; return its Work.

    The Work starts when the call begins, which a future does not report, and ends with
    what it returns or raises. A call whose Work is aborted while it queues is not made.

    ``torch.distributed`` has no such function.

    Parameters
    ----------
    executor : concurrent.futures.Executor
        With one thread, calls run in the order of issue.
    function : callable
        The op. It may return ``None``: the op's usual result.
    *args : object
        Its arguments.
    op_type : OpType, default UNKNOWN
        The op, in messages and in the Flight Recorder.

    Returns
    -------
    Work
        The Work.

    Examples
    --------
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor(1) as thread:
    ...     work = dist.create_work_from_call(thread, max, 1, 2)
    >>> work.result()
    2
    """
    work = Work(op_type)

    def run() -> None:
        if work.state.is_terminal:
            return
        work.mark_started()
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001 - it belongs to the Work
            work.mark_failed(error)
        else:
            work.mark_completed(result)

    executor.submit(run)
    return work
