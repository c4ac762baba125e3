"""Starting ops: from an op that is checked and recorded to a Work in flight.

A backend may return a Work, raise, or lose a connection, and an abort may end the
group meanwhile: every case ends in a Work that is bound to its record, or in an error
that names the op.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConnectionLostError, DistBackendError, DistError
from ..interface.op import Op, fuse
from ..work.flight_recorder import Batch, Record
from ..work.futures import completed_work
from ..work.state import WorkState
from ..work.work import Work
from .capture import PendingOp
from .generation import Generation

__all__ = ["REFUSALS", "NoWorkError", "SelfTimedWork", "start", "start_run"]

#: By these a backend says that it has not taken an op: see `Backend`. A rank whose
#: memory is exhausted raises the last one.
REFUSALS = (TypeError, ValueError, NotImplementedError, MemoryError)


class NoWorkError(TypeError):
    """The backend has taken the op, but has returned something else than a Work."""


def start_run(current: Generation, run: Sequence[PendingOp]) -> list[Work]:
    """Start the ops of `run`; return a Work for each, or one for all of them."""
    if run[0].op_type.spec.fused and run[0].op.is_fusible:
        batch = Batch([pending.entry for pending in run])
        return [start(current, batch, fuse([pending.op for pending in run]))]
    with run[0].op.backend.coalescing():
        return [start(current, pending.entry, pending.op) for pending in run]


def start(current: Generation, record: Record | Batch, op: Op) -> Work:
    """Start `op` and bind its Work to `record`; the issue lock is held."""
    arrays = op.arrays
    if arrays and not arrays[0].size and not op.kind.spec.runs_empty and op.is_empty:
        # Later ops of other ranks may need the connection before this rank does.
        op.backend.prepare(op.arrays)
        work = completed_work(op.kind, op.result)
        work.bind(record)
        return work
    if current.loss is not None:
        return _withheld(current, record, op)
    try:
        work = op.start()
        if not isinstance(work, Work):
            raise NoWorkError(
                f"{record.describe()}: the backend returned a "
                f"{type(work).__name__}; expected a Work; "
                "create_work_from_call and create_work_from_future make one"
            )
    except ConnectionLostError as error:
        return _withheld(current, record, op, error)
    except BaseException as error:
        raised = error
        if current.aborted is not None and isinstance(error, DistError):
            # The abort had stopped the backend.
            raised = current.aborted_error(record)
        elif isinstance(error, DistBackendError):
            raised = DistBackendError(
                f"{record.describe()}: {error}",
                **record.identity(),
                culprits=current.spec.global_ranks(error.culprits),
                reason=str(error),
            )
        work = Work(op.kind)
        work.mark_failed(raised)
        work.bind(record)
        if raised is error:
            raise
        raise raised from None
    work.op_type = op.kind
    work.timed = current.timing
    try:
        if not work.is_completed():
            current.status.in_flight[record.op_id] = work
        if current.loss is not None:
            work.hold_failures()
        if current.aborted is not None:
            work = _aborted_meanwhile(current, record, work)
        if not work.bind(record, op.result):
            return _withheld(current, record, op, work._exception)
    except BaseException:
        # An interrupt of this thread does not end the op.
        work.bind(record, op.result)
        raise
    return work


def _withheld(
    current: Generation,
    record: Record | Batch,
    op: Op,
    error: BaseException | None = None,
) -> Work:
    """Return a Work for an op whose backend has lost a connection.

    It stays in flight until the group knows the cause and aborts. `error` is the
    failure, if the op has failed.
    """
    work = Work(op.kind)
    work.timed = current.timing
    current.status.in_flight[record.op_id] = work
    if current.aborted is not None:
        work = _aborted_meanwhile(current, record, work)
    work.bind(record)
    if error is not None:
        work.mark_failed(error)
    return work


def _aborted_meanwhile(current: Generation, record: Record | Batch, work: Work) -> Work:
    """Return the Work, not bound yet, of an op during whose start the group ended.

    The abort may have passed over `work`, which was not in flight then, and have
    stopped the backend under it: what failed so is a consequence of the abort.
    """
    error = current.aborted_error(record)
    if work.state is WorkState.FAILED:
        work = Work(work.op_type)
    work.fail_pending_as(error)
    work.mark_failed(error, WorkState.ABORTED)
    return work


class SelfTimedWork(Work):
    """The Work of an op whose caller keeps its deadline: no watchdog ends it."""

    __slots__ = ()

    def begun_ns(self, oldest: bool) -> int:
        return 0
