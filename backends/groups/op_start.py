"""Starting ops: from an op that is checked and recorded to a Work in flight.

A backend may return a Work, raise, or lose a connection, and an abort may end the
group meanwhile: every case ends in a Work that is bound to its record, or in an error
that names the op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from ..errors import ConnectionLostError, DistBackendError, DistError
from ..interface.op import Op, fuse
from ..work.composite import completed_work
from ..work.flight_recorder import Batch, Record
from ..work.state import WorkState
from ..work.work import Work
from .generation import Generation

__all__ = [
    "REFUSALS",
    "NoWorkError",
    "PendingOp",
    "SelfTimedWork",
    "fusible_runs",
    "start",
    "start_run",
]

#: By these a backend says that it has not taken an op: see `Backend`. A rank whose
#: memory is exhausted raises the last one.
REFUSALS = (TypeError, ValueError, NotImplementedError, MemoryError)

# Seconds for which the end of an op waits until an abort has stopped the backends:
# longer than one of ours takes to copy the rest of a large message.
_STOP_WAIT = 10.0


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
        if not work.state.is_terminal:
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
    # Another thread may be in the midst of the abort, and the backend of a copy.
    current.stopped.wait(_STOP_WAIT)
    work.fail_by_group(error)
    return work


class SelfTimedWork(Work):
    """The Work of an op whose caller keeps its deadline: no watchdog ends it."""

    __slots__ = ()

    def begun_at(self, oldest: bool) -> float | None:
        return None


class PendingOp(Work):
    """An op of a coalescing block, and the Work that the caller gets for it."""

    __slots__ = ("entry", "generation", "issued", "op")

    def __init__(self, generation: Generation, entry: Record, op: Op) -> None:
        super().__init__(op.kind, op.result)
        self.generation = generation
        self.entry = entry
        self.op = op
        # The Work of the backend's call, for this op alone or for several.
        self.issued: Work | None = None

    def follow(self, work: Work) -> None:
        """End as `work` ends, which runs this op, alone or with others."""
        self.issued = work
        self.timed = work.timed
        work._when_over(self._settle)

    def _settle(self, work: Work) -> None:
        error = work._exception
        self.started_ns = work.started_ns
        if error is None:
            # One Work for several ops has the results of them all.
            result = work._result if self.op.result is None else None
            self.mark_completed(result, completed_ns=work.completed_ns)
        else:
            self.mark_failed(error, work.state)

    @property
    def sequence_number(self) -> int:
        """The batch's sequence number; -1 before it is issued."""
        return self.entry.seq

    def describe(self) -> str:
        """Return the op as messages name it."""
        return self.entry.describe()

    def identity(self) -> dict[str, Any]:
        return self.entry.identity()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        if timeout is None and self.issued is not None and self.issued.on_device:
            return self.issued.wait()
        return super().wait(timeout)

    def synchronize(self) -> None:
        if self.issued is not None:
            self.issued.synchronize()
        super().wait()

    def result(self) -> Any:
        if self.issued is not None and self.issued.on_device and not self._exception:
            self.issued.result()
            return self._outputs()
        return super().result()

    def drop(self, reason: str) -> None:
        """End the op, which will not be issued."""
        error = DistBackendError(reason, **self.identity(), reason=reason)
        self.mark_failed(error, WorkState.ABORTED)

    def finish(self, async_op: bool) -> Work | None:
        return self if async_op else None

    def detach(self) -> None:
        if self.issued is not None:
            self.issued.detach()

    def _block(self, timeout: float | None) -> bool:
        if self.issued is None:
            raise DistBackendError(
                f"{self.op_type.value}: it is issued when its coalescing_manager "
                "block ends; wait after the block",
                **self.identity(),
            )
        return self.issued._block(timeout) and super()._block(timeout)


def fusible_runs(ops: Sequence[PendingOp]) -> Iterator[list[PendingOp]]:
    """Split `ops` into runs that one backend call each can do, in order."""
    run: list[PendingOp] = []
    for pending in ops:
        if run and not _belong_together(run[-1].op, pending.op):
            yield run
            run = []
        run.append(pending)
    if run:
        yield run


def _belong_together(one: Op, other: Op) -> bool:
    if one.backend is not other.backend:
        return False
    if one.kind.is_p2p and other.kind.is_p2p:
        return True
    return (
        one.kind.spec.fused
        and one.kind is other.kind
        and one.reduce_op is other.reduce_op
        and one.is_fusible
    )
