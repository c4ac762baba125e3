"""Captured ops: what is issued inside a coalescing block, before it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from .backend import Array, Backend
from .errors import DistBackendError
from .recorder import Record
from .reduce_op import ReduceOp
from .work import OpType, Work, WorkState

__all__ = ["FUSED", "Captured", "runs"]

#: The op types whose runs become one backend call.
FUSED = (
    OpType.ALL_REDUCE,
    OpType.ALL_GATHER_INTO_TENSOR,
    OpType.REDUCE_SCATTER_TENSOR,
)


class Captured(Work):
    """An op in a coalescing block, and its Work: it is issued when the block ends."""

    __slots__ = ("arrays", "backend", "call", "entry", "issued", "reduce_op")

    def __init__(
        self,
        entry: Record,
        backend: Backend,
        arrays: Sequence[Array],
        call: Callable[[Backend], Work],
        reduce_op: ReduceOp | None,
    ) -> None:
        super().__init__(entry.op_type)
        self.entry = entry
        self.backend = backend
        self.arrays = arrays
        self.call = call
        self.reduce_op = reduce_op
        self.issued: Work | None = None

    def follow(self, work: Work) -> None:
        """`work` does this op, alone or with others: end as it ends."""
        self.issued = work
        self.timed = work.timed
        work.add_done_callback(self._settle)

    def _settle(self, work: Work) -> None:
        error = work._exception
        self.started_ns = work.started_ns
        if error is None:
            self.mark_completed(work.result(), completed_ns=work.completed_ns)
        else:
            self.mark_failed(error, work.state)

    @property
    def sequence_number(self) -> int:
        """The batch's sequence number; -1 before it is issued."""
        return self.entry.seq

    def describe(self) -> str:
        """The op as messages name it; its record is written by the Work it follows."""
        return self.entry.describe()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        if timeout is None and self.issued is not None and self.issued.on_device:
            return self.issued.wait()
        return super().wait(timeout)

    def result(self) -> Any:
        if self.issued is not None and self.issued.on_device and not self._exception:
            self.issued.result()
            return self._result
        return super().result()

    def drop(self, reason: str) -> None:
        """The op will never be issued."""
        self.mark_failed(DistBackendError(reason), WorkState.ABORTED)

    def finish(self, async_op: bool) -> Work | None:
        return self if async_op else None

    def detach(self) -> None:
        if self.issued is not None:
            self.issued.detach()

    def _block(self, timeout: float | None) -> bool:
        if self.issued is None:
            raise DistBackendError(
                f"{self.op_type.value}: it is issued when its coalescing_manager "
                "block ends; wait after the block"
            )
        return self.issued._block(timeout) and super()._block(timeout)


def runs(ops: Sequence[Captured]) -> Iterator[list[Captured]]:
    """Split `ops` into runs that one backend call each can do, in order."""
    run: list[Captured] = []
    for op in ops:
        if run and not _belong_together(run[-1], op):
            yield run
            run = []
        run.append(op)
    if run:
        yield run


def _belong_together(one: Captured, other: Captured) -> bool:
    if one.backend is not other.backend:
        return False
    if one.op_type.is_p2p and other.op_type.is_p2p:
        return True
    return (
        one.op_type in FUSED
        and one.op_type is other.op_type
        and one.reduce_op is other.reduce_op
    )
