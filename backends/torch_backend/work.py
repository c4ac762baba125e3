"""The Work of an op for torch: it waits for Rankscope's Work, in Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from ..groups.dispatch import PendingOp
from ..work.work import Work
from . import private
from .driving import future_of
from .private import c10d, disable_dynamo

__all__ = ["BatchedWork", "TorchWork", "wait_for_batches"]

_NO_TIMEOUT = timedelta(0)


class TorchWork(c10d.Work):  # type: ignore[misc]
    """A ``torch.distributed.Work`` that ends as `work` does; `outputs` are tensors."""

    def __init__(self, work: Work, outputs: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.work, self._outputs = work, outputs
        self._future: torch.futures.Future | None = None
        self._waited = False

    @disable_dynamo
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self.work.wait(timeout if timeout else None)
        self._waited = True
        return True

    @disable_dynamo
    def synchronize(self) -> None:
        self.work.synchronize()

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def is_success(self) -> bool:
        return self.work.is_success()

    def exception(self) -> BaseException | None:
        return self.work.exception()

    @disable_dynamo
    def result(self) -> list[torch.Tensor]:
        self.work.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        return self.work.source_rank()

    _source_rank = source_rank

    @disable_dynamo
    def get_future(self) -> torch.futures.Future:
        if self._future is None:
            outputs = list(self._outputs)
            self._future = future_of(self.work, outputs, self._waited)
        return self._future

    def _get_sequence_number(self) -> int:
        return self.work.sequence_number

    def _get_duration(self) -> float:
        duration = self.work.get_duration()
        if duration is None:
            raise RuntimeError(f"{self.work.describe()} has no duration yet")
        return duration

    def __repr__(self) -> str:
        return repr(self.work)


class BatchedWork(TorchWork):
    """The Work of an op of a batch, which is issued when its block ends."""

    work: PendingOp

    @disable_dynamo
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        # Torch's functions wait for an op in the block, too, without async_op=True.
        return self.work.issued is None or super().wait(timeout)


class _LastWork(TorchWork):
    """The Work of the last op of a batch, which waits for those `before` it, too."""

    def __init__(self, last: TorchWork, before: Sequence[TorchWork]) -> None:
        super().__init__(last.work, last._outputs)
        self._before = before

    @disable_dynamo
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for one in self._before:
            one.wait(timeout)
        return super().wait(timeout)


#: The oldest release of torch whose pipelines wait for each op of a batch.
_WAITS_FOR_EACH = (2, 8)


@functools.cache
def wait_for_batches() -> None:
    """Have pipelines wait for all that they receive; later calls do nothing.

    The schedules of torch 2.7 keep the last Work of a batch alone, since NCCL has one
    for the whole batch (pytorch/pytorch#132644): they would compute with what has not
    arrived.
    """
    if private.release < _WAITS_FOR_EACH:
        private.replace(torch.distributed, "batch_isend_irecv", _waited_as_one)


def _waited_as_one(issue: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(issue)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        works = issue(p2p_op_list)
        if works and isinstance(works[-1], TorchWork):
            works[-1] = _LastWork(works[-1], works[:-1])
        return works

    return batch_isend_irecv
