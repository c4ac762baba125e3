"""Pending ops: ops of a coalescing block, which are issued when the block ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from ..errors import DistBackendError
from ..interface.op import Op
from ..work.flight_recorder import Record
from ..work.state import WorkState
from ..work.work import Work
from .generation import Generation

__all__ = ["PendingOp", "fusible_runs"]


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
        work.add_done_callback(self._settle)

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
