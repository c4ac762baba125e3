"""ProcessGroup: several backends behind one dispatch point."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .backend import Array, Backend
from .capture import FUSED, Captured, runs
from .composite import chain, join
from .errors import DistBackendError, DistError
from .group_life import GroupLife
from .hooks import active_hooks
from .op_timeout import own_timeout
from .recorder import Batch, Record, recorder
from .reduce_op import ReduceOp
from .watchdog import watchdog
from .work import OpType, Work, WorkState

__all__ = ["ProcessGroup", "check_reduction"]

_AVG = ReduceOp.AVG


class ProcessGroup(GroupLife):
    """A set of ranks with one :class:`Backend` per device type.

    Backends are built at the first use of their device type, so that a group
    whose config names a library that is not there works until an array of
    that device type comes. Every op goes through :meth:`issue`, the one place
    where it is checked, shown to hooks, numbered, recorded and started.
    """

    def issue(
        self,
        op_type: OpType,
        device: str,
        arrays: Sequence[Array],
        call: Callable[[Backend], Work],
        *,
        reduce_op: ReduceOp | None = None,
        peer: int | None = None,
        result: Any = None,
    ) -> Work:
        """Check, number, record and start one op; return its Work.

        `arrays` are the validated inputs and outputs, `call` starts the op on
        the backend of `device`. An op on nothing but empty arrays is a
        completed Work with its own sequence number.
        """
        backend = self._backends.get(device) or self._backend_for(device, op_type)
        if reduce_op is not None or arrays:
            dtype = arrays[0].dtype if arrays else None
            check_reduction(backend, op_type, dtype, reduce_op)
        timeout = own_timeout() or self.timeout
        record = Record(self.status, op_type, arrays, peer, timeout, backend.name)
        hooks = active_hooks()
        for hook in hooks:
            hook.before(record)
        if self._captures:
            batch = self._captures.get(threading.get_ident())
            if batch is not None:
                batch.append(Captured(record, backend, arrays, call, reduce_op))
                return batch[-1]
        watchdog.touch()
        with self._issue_lock:
            self._handed = record, time.monotonic()
            try:
                self.raise_if_aborted(op_type)
                record.number()
                recorder.add(record)
                work = self._start(record, record, backend, arrays, call, result)
            finally:
                self._handed = None
        for hook in hooks:
            hook.watch(record, work)
        return work

    def _start(
        self,
        record: Record | Batch,
        first: Record,
        backend: Backend,
        arrays: Sequence[Array],
        call: Callable[[Backend], Work],
        result: Any,
    ) -> Work:
        """Run `call` and bind its Work to `record`; the issue lock is held."""
        if arrays and not arrays[0].size and not any(a.size for a in arrays):
            # Other ranks may have something, and need this one.
            backend.prepare(arrays)
            work = Work(first.op_type, result)
            work.mark_started()
            work.mark_completed()
            work.bind(record)
            return work
        try:
            work = call(backend)
            if not isinstance(work, Work):
                raise TypeError(
                    f"{record.describe()}: the backend returned a "
                    f"{type(work).__name__}; expected a Work; "
                    "create_work_from_call and create_work_from_future make one"
                )
        except BaseException as error:
            told = error
            if self.aborted is not None and isinstance(error, DistError):
                # It came too late for the backend.
                told = self._aborted_error(record.describe())
            elif isinstance(error, DistBackendError):
                told = DistBackendError(f"{record.describe()}: {error}")
            work = Work(first.op_type)
            work.mark_failed(told)
            work.bind(record)
            if told is error:
                raise
            raise told from None
        work.op_type = first.op_type
        work.timed = self.timing
        if work._result is None:
            work._result = result
        try:
            self.status.in_flight[first.op_id] = work
            work.bind(record)
        except BaseException:
            # An interrupt; the op is under way all the same.
            work.bind(record)
            raise
        # abort() may have swept the Works in flight before this one was there.
        if self.aborted is not None:
            work.mark_failed(self._aborted_error(work.describe()), WorkState.ABORTED)
        return work

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Captured] | None]:
        """Collect the ops this thread issues in the block instead of issuing them.

        Yields the list they are put in, or ``None`` inside another such block
        of this thread, which then gets them.
        """
        thread = threading.get_ident()
        if thread in self._captures:
            yield None
            return
        batch: list[Captured] = []
        self._captures[thread] = batch
        try:
            yield batch
        except BaseException:
            for op in batch:
                op.drop("the coalescing_manager block raised, nothing was issued")
            raise
        finally:
            del self._captures[thread]

    @property
    def capturing(self) -> bool:
        """Whether this thread is in a block that collects ops instead of issuing."""
        return threading.get_ident() in self._captures

    def issue_batch(self, batch: Sequence[Captured]) -> list[Work]:
        """Issue captured ops in order, each run that fits together as one call."""
        if not batch:
            return []
        issued: list[tuple[list[Captured], list[Work]]] = []
        watchdog.touch()
        with self._issue_lock:
            self._handed = batch[0].entry, time.monotonic()
            try:
                self.raise_if_aborted(OpType.COALESCED)
                seen: set[bool] = set()
                for op in batch:
                    op.entry.number(first=op.op_type.is_p2p not in seen)
                    seen.add(op.op_type.is_p2p)
                    recorder.add(op.entry)
                for run in runs(batch):
                    issued.append((run, self._start_run(run)))
            finally:
                self._handed = None
        # Not under the lock: what is over already has its callbacks run.
        for run, works in issued:
            for place, op in enumerate(run):
                op.follow(works[place] if len(works) > 1 else works[0])
        for hook in active_hooks():
            for op in batch:
                hook.watch(op.entry, op)
        return [
            works[0] if len(works) == 1 else join(works, run[0].op_type)
            for run, works in issued
        ]

    def _start_run(self, run: Sequence[Captured]) -> list[Work]:
        """Start the ops of `run`; a Work for each, or one for all of them."""
        backend, kind, op = run[0].backend, run[0].op_type, run[0].reduce_op
        if kind not in FUSED:
            with backend.coalescing():
                return [
                    self._start(
                        one.entry, one.entry, backend, one.arrays, one.call, None
                    )
                    for one in run
                ]
        arrays = [array for one in run for array in one.arrays]
        full = [one for one in run if any(array.size for array in one.arrays)]
        work = self._start(
            Batch([one.entry for one in run]),
            run[0].entry,
            backend,
            arrays,
            lambda backend: self._fused(backend, kind, full, op),
            None,
        )
        return [work]

    def _fused(
        self,
        backend: Backend,
        kind: OpType,
        run: Sequence[Captured],
        op: ReduceOp | None,
    ) -> Work:
        """One backend call for a run of `FUSED` ops that have something in them."""
        outputs = [one.arrays[-1] for one in run]
        inputs = [one.arrays[0] for one in run]
        effective = _without_avg(backend, op)
        if kind is OpType.ALL_GATHER_INTO_TENSOR:
            return backend.all_gather_into_tensor_coalesced(outputs, inputs)
        assert effective is not None
        if kind is OpType.ALL_REDUCE:
            work = backend.all_reduce_coalesced(outputs, effective)
        else:
            work = backend.reduce_scatter_tensor_coalesced(outputs, inputs, effective)
        if effective is op:
            return work

        def divide() -> None:
            for output in outputs:
                _divide(output, self.size())

        return chain(work, kind, divide)

    def enter(self, op_type: OpType, timeout: float, peer: int | None) -> Work:
        """Number and record an op that no backend runs; the caller ends its Work."""
        with self._issue_lock:
            self.raise_if_aborted(op_type)
            record = Record(self.status, op_type, (), peer, timeout)
            record.number()
            recorder.add(record)
            work = Work(op_type)
            self.status.in_flight[record.op_id] = work
            work.bind(record)
            work.mark_started()
        return work

    def reduce_issue(
        self,
        op_type: OpType,
        device: str,
        arrays: Sequence[Array],
        call: Callable[[Backend, ReduceOp], Work],
        reduce_op: ReduceOp,
        output: Array | None,
        peer: int | None = None,
    ) -> Work:
        """Issue a reduction; AVG becomes SUM and a division of `output` by the size.

        `output` is what this rank receives, ``None`` if it receives nothing.
        """

        def run(backend: Backend) -> Work:
            effective = _without_avg(backend, reduce_op)
            assert effective is not None
            work = call(backend, effective)
            if effective is reduce_op or output is None:
                return work
            return chain(work, op_type, lambda: _divide(output, self.size()), output)

        return self.issue(
            op_type, device, arrays, run, reduce_op=reduce_op, peer=peer, result=output
        )


def check_reduction(
    backend: Backend, op_type: OpType, dtype: Any, op: ReduceOp | None
) -> None:
    """Raise `TypeError` or `ValueError` where `backend` cannot do this on `dtype`."""
    effective = _without_avg(backend, op)
    if effective is not op and dtype is not None and dtype.kind == "b":
        raise TypeError(
            f"{op_type.value}: ReduceOp.AVG is not defined for arrays of bool; use MAX "
            "(or), MIN (and), or convert them: x.astype(np.float32)"
        )
    backend.check(op_type, dtype, effective)


def _without_avg(backend: Backend, op: ReduceOp | None) -> ReduceOp | None:
    if op is _AVG and _AVG not in backend.reduce_ops:
        return ReduceOp.SUM
    return op


def _divide(output: Array, size: int) -> None:
    if output.dtype.kind in "iu":
        # Towards zero, as NCCL's average of integers; // would round down.
        output[...] = np.sign(output) * (abs(output) // size)
    else:
        output /= size
