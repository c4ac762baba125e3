"""The `dummy` backend: all_reduce and all_gather that set every output to zero.

The work is done in C++ (``dummy.cpp``). These two classes are what Rankscope
sees of it: a C++ class cannot derive from a Python class, so each of them holds
its C++ half.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from _rankscope_dummy import Op, Worker

import rankscope as dist

__all__ = ["DummyBackend", "DummyWork", "register"]


class DummyWork(dist.Work):
    """A Work that can say how far it is."""

    __slots__ = ("op",)
    op: Op

    @property
    def progress(self) -> float:
        """The part that is done, from 0 to 1: read while the C++ thread writes."""
        return self.op.bytes_done / self.op.bytes


class DummyBackend(dist.Backend):
    """Hands each op to a C++ thread; what is not defined here it does not have."""

    interface_version = 1

    def __init__(self, rank: int, size: int, bytes_per_second: float) -> None:
        super().__init__(rank, size)
        self._worker = Worker(bytes_per_second)
        # The thread has to end before the interpreter does, shutdown or not.
        weakref.finalize(self, self._worker.close)

    def all_reduce(self, tensor: Any, op: dist.ReduceOp) -> dist.Work:
        return self._start(dist.OpType.ALL_REDUCE, [tensor])

    def all_gather(self, tensor_list: Sequence[Any], tensor: Any) -> dist.Work:
        return self._start(dist.OpType.ALL_GATHER, tensor_list)

    def _start(self, kind: dist.OpType, outputs: Sequence[Any]) -> dist.Work:
        work = DummyWork(kind)
        work.op = self._worker.submit(work, outputs)
        return work

    def abort(self, reason: str) -> None:
        self._worker.abort()

    def shutdown(self) -> None:
        self._worker.close()


def register(name: str = "dummy", bytes_per_second: float = math.inf) -> None:
    """Make it known as `name`, for host memory and arrays of device type ``ext``.

    The entry point in ``pyproject.toml`` names this function. A finite
    `bytes_per_second` plays a slow network.
    """

    def create(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Backend:
        return DummyBackend(rank, size, bytes_per_second)

    dist.Backend.register_backend(name, create, devices=["cpu", "ext"])
