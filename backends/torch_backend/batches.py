"""Batches of sends and receives: pipelines of torch 2.7 wait for the last op alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed

from . import private
from .work import LastWork, TorchWork

__all__ = ["install"]

#: The oldest release of torch whose pipelines wait for each op of a batch.
_WAITS_FOR_EACH = (2, 8)


@functools.cache
def install() -> None:
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
            works[-1] = LastWork(works[-1], works[:-1])
        return works

    return batch_isend_irecv
