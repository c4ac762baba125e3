"""Works made of what happens elsewhere: of a future, a call, or an op that is over."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

from ..errors import DistBackendError
from .op_type import OpType
from .state import WorkState
from .work import Work

__all__ = ["completed_work", "create_work_from_call", "create_work_from_future"]


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
    >>> work.is_completed()
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
        if work.is_completed():
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
