"""A backend that does what a test tells it to, when it tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import rankscope as dist

__all__ = ["Manual", "OnDevice"]


class Manual(dist.Backend):
    """Keeps every Work until the test ends it; knows what the tests need."""

    name = "manual"
    reduce_ops = frozenset({dist.ReduceOp.SUM, dist.ReduceOp.MAX})
    made: list[Manual] = []  # noqa: RUF012 - what the tests look at

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        self.calls: list[tuple[Any, ...]] = []
        self.works: list[dist.Work] = []
        self.aborted: list[str] = []
        self.closed = False
        Manual.made.append(self)

    def _new(self, kind: dist.OpType, *arguments: Any) -> dist.Work:
        work = dist.Work(kind)
        self.works.append(work)
        self.calls.append((kind, *arguments))
        return work

    def all_reduce(self, tensor: Any, op: dist.ReduceOp) -> dist.Work:
        return self._new(dist.OpType.ALL_REDUCE, tensor, op)

    def all_gather(self, tensor_list: Sequence[Any], tensor: Any) -> dist.Work:
        for output in tensor_list:
            output[...] = tensor
        return self._new(dist.OpType.ALL_GATHER, tensor)

    def barrier(self) -> dist.Work:
        return self._new(dist.OpType.BARRIER)

    def send(self, tensor: Any, dst: int, tag: int) -> dist.Work:
        return self._new(dist.OpType.SEND, tensor, dst, tag)

    def recv(self, tensor: Any, src: int | None, tag: int) -> dist.Work:
        return self._new(dist.OpType.RECV, tensor, src, tag)

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)

    def shutdown(self) -> None:
        self.closed = True


class OnDevice:
    """An array of another device type: what DLPack says, and no memory."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.shape, self.dtype, self.size = (3,), np.dtype("f4"), 3

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.code, 0
