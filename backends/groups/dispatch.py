"""Dispatch: the one point that checks, numbers, records and starts ops.

A backend may return a Work, raise, or lose a connection, and an abort may end the
group meanwhile: every case ends in a Work that is bound to its record, or in an error
that names the op.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from ..errors import ConnectionLostError, DistBackendError, DistError
from ..interface.op import Op, fuse
from ..interface.overlap import check_overlap
from ..work.composite import completed_work, join
from ..work.flight_recorder import Batch, Record, recorder
from ..work.op_timeout import own_timeout
from ..work.op_type import OpType
from ..work.sigint import interrupt
from ..work.state import WorkState
from ..work.work import Work
from .generation import Generation
from .group_ops import GroupOps
from .spec import GroupSpec
from .watchdog import watchdog

__all__ = ["Dispatcher", "PendingOp"]

#: By these a backend says that it has not taken an op: see `Backend`. A rank whose
#: memory is exhausted raises the last one.
_REFUSALS = (TypeError, ValueError, NotImplementedError, MemoryError)


class Dispatcher(GroupOps):
    """The part of a group that issues its ops, in the generation of the moment."""

    def __init__(self, spec: GroupSpec, current: Generation) -> None:
        self._spec, self._current = spec, current
        # The batch that each thread inside a coalescing block is filling.
        self._captures: dict[int, list[PendingOp]] = {}

    def issue(self, op: Op) -> Work:
        """Check, number, record and start `op`; return its Work.

        An op on nothing but empty arrays is a completed Work with a sequence number of
        its own, unless it `OpSpec.runs_empty`. In a coalescing block of this thread the
        op is only checked, and issued with the batch.

        Raises
        ------
        TypeError, ValueError, NotImplementedError
            The backend refuses the op, which gets no number.
        DistAbortedError, DistBackendError
            The group is aborted or suspended, or the peer has left it.
        """
        current, spec, kind = self._current, self._spec, op.kind
        backend = current.backends.get(op.device)
        if backend is None:
            backend = current.backend_for(op.device, kind)
        op.check(backend)
        if len(op.arrays) > 1:
            check_overlap([op], spec.rank, spec.size, spec.describe)
        record = Record(
            current.status,
            kind,
            op.arrays,
            op.peer,
            own_timeout() or spec.timeout,
            backend.name,
            op.reduce_op,
            op.tag,
            op.splits,
        )
        hooks = recorder.hooks
        for hook in hooks:
            hook.before(record)
        if self._captures:
            batch = self._captures.get(threading.get_ident())
            if batch is not None:
                pending = PendingOp(current, record, op)
                batch.append(pending)
                return pending
        with current.issue_lock:
            current.handing_over = record
            if watchdog.idle:
                watchdog.wake()
            try:
                if current.aborted or current.departures.by_rank or current.suspended:
                    current.refuse(kind, op.peer, backend)
                record.number()
                recorder.add(record)
                work = _start(current, record, op)
            except _NoWorkError:
                raise
            except _REFUSALS:
                recorder.withdraw(record)
                raise
            finally:
                current.handing_over = None
        for hook in hooks:
            hook.watch(record, work)
        if interrupt.is_put_off:
            interrupt.raise_put_off()
        return work

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[PendingOp]]:
        """Collect the ops this thread issues in the block instead of issuing them.

        Another such block of this thread around it gets them at its end.

        Yields
        ------
        list
            The list they are put in.
        """
        thread = threading.get_ident()
        outer = self._captures.get(thread)
        batch: list[PendingOp] = []
        self._captures[thread] = batch
        try:
            yield batch
        except BaseException:
            for op in batch:
                op.drop("the coalescing_manager block raised, nothing was issued")
            raise
        finally:
            del self._captures[thread]
            if outer is not None:
                self._captures[thread] = outer
        if outer is not None:
            outer += batch

    @property
    def capturing(self) -> bool:
        """Whether this thread is in a block that collects ops instead of issuing."""
        return threading.get_ident() in self._captures

    def issue_batch(self, batch: Sequence[PendingOp]) -> list[Work]:
        """Issue captured ops in order, each run of fusible ops as one call.

        Returns
        -------
        list of Work
            One for each run.

        Raises
        ------
        ValueError
            Ops that start together overlap in memory; none is issued.
        """
        if not batch:
            return []
        spec, runs = self._spec, list(_fusible_runs(batch))
        for run in runs:
            if len(run) > 1:
                started = [pending.op for pending in run]
                check_overlap(started, spec.rank, spec.size, spec.describe)
        issued: list[tuple[list[PendingOp], list[Work]]] = []
        # After a rebuild inside the block, that of the first op has ended.
        current = batch[0].generation
        with current.issue_lock:
            current.handing_over = batch[0].entry
            if watchdog.idle:
                watchdog.wake()
            try:
                current.raise_if_aborted(OpType.COALESCED)
                for pending in batch:
                    op = pending.op
                    current.refuse(op.kind, op.peer, op.backend)
                seen: set[bool] = set()
                for pending in batch:
                    is_p2p = pending.op_type.is_p2p
                    pending.entry.number(first=is_p2p not in seen)
                    seen.add(is_p2p)
                    recorder.add(pending.entry)
                for run in runs:
                    issued.append((run, _start_run(current, run)))
            finally:
                current.handing_over = None
        # Not under the lock: callbacks of Works that are over run here.
        for run, works in issued:
            for place, pending in enumerate(run):
                pending.follow(works[place] if len(works) > 1 else works[0])
        for hook in recorder.hooks:
            for pending in batch:
                hook.watch(pending.entry, pending)
        return [
            works[0] if len(works) == 1 else join(works, run[0].op_type)
            for run, works in issued
        ]

    def enter(
        self,
        op_type: OpType,
        timeout: float | None = None,
        peer: int | None = None,
        work: Work | None = None,
    ) -> Work:
        """Number and record an op that no backend runs; return its Work, started.

        The caller ends the Work.

        Parameters
        ----------
        timeout : float, optional
            Seconds; the default is as for the other ops of the group. Of an op without
            `work` the caller keeps the deadline, too: it is only shown.
        work : Work, optional
            Its Work, which is timed out as every Work is; the default is a new one.
        """
        current = self._current
        seconds = timeout or own_timeout() or self._spec.timeout
        record = Record(current.status, op_type, (), peer, seconds)
        hooks = recorder.hooks
        for hook in hooks:
            hook.before(record)
        with current.issue_lock:
            current.refuse(op_type, peer)
            record.number()
            recorder.add(record)
            work = _SelfTimedWork(op_type) if work is None else work
            current.status.in_flight[record.op_id] = work
            if watchdog.idle:
                watchdog.wake()
            work.bind(record)
            work.mark_started()
        for hook in hooks:
            hook.watch(record, work)
        return work


class _NoWorkError(TypeError):
    """The backend has taken the op, but has returned something else than a Work."""


def _start_run(current: Generation, run: Sequence[PendingOp]) -> list[Work]:
    """Start the ops of `run`; return a Work for each, or one for all of them."""
    if run[0].op_type.spec.fused and run[0].op.is_fusible:
        batch = Batch([pending.entry for pending in run])
        return [_start(current, batch, fuse([pending.op for pending in run]))]
    with run[0].op.backend.coalescing():
        return [_start(current, pending.entry, pending.op) for pending in run]


def _start(current: Generation, record: Record | Batch, op: Op) -> Work:
    """Start `op` and bind its Work to `record`; the issue lock is held."""
    arrays, kind = op.arrays, op.kind
    if arrays and not arrays[0].size and not kind.spec.runs_empty and op.is_empty:
        # Later ops of other ranks may need the connection before this rank does.
        op.backend.prepare(arrays)
        work = completed_work(kind, op.result)
        work.bind(record)
        return work
    try:
        # After the loss of a connection it stays in flight until the group aborts.
        work = op.start() if current.loss is None else Work(kind)
        if not isinstance(work, Work):
            raise _NoWorkError(
                f"{record.describe()}: the backend returned a "
                f"{type(work).__name__}; expected a Work; "
                "create_work_from_call and create_work_from_future make one"
            )
    except ConnectionLostError as error:
        return _bound(current, record, op, Work(kind), error)
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
        work = Work(kind)
        work.mark_failed(raised)
        work.bind(record)
        if raised is error:
            raise
        raise raised from None
    return _bound(current, record, op, work)


def _bound(
    current: Generation,
    record: Record | Batch,
    op: Op,
    work: Work,
    lost: BaseException | None = None,
) -> Work:
    """Return the Work of an op, bound to `record`: `work`, or one in its place.

    `lost` is the lost connection with which the op has failed. Its Work stays in flight
    until the group knows the cause and aborts.
    """
    work.op_type = op.kind
    work.timed = current.timing
    try:
        if not work._state.is_terminal:
            current.status.in_flight[record.op_id] = work
        if current.loss is not None:
            work.hold_failures()
        if current.aborted is not None:
            work = _aborted_meanwhile(current, record, work)
        is_bound = work.bind(record, op.result)
    except BaseException:
        # An interrupt of this thread does not end the op.
        work.bind(record, op.result)
        raise
    if not is_bound:
        return _bound(current, record, op, Work(op.kind), work._exception)
    if lost is not None:
        work.mark_failed(lost)
    return work


def _aborted_meanwhile(current: Generation, record: Record | Batch, work: Work) -> Work:
    """Return the Work, not bound yet, of an op during whose start the group ended.

    The abort may have passed over `work`, which was not in flight then, and have
    stopped the backend under it: what failed so is a consequence of the abort.
    """
    # Another thread may be in the midst of the abort, and the backend of a copy.
    error = current.aborted_error(record)
    if work.state is WorkState.FAILED:
        work = Work(work.op_type)
    work.fail_by_group(error)
    return work


class _SelfTimedWork(Work):
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


def _fusible_runs(ops: Sequence[PendingOp]) -> Iterator[list[PendingOp]]:
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
