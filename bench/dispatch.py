"""What one op costs beside the library: dispatch, Work and flight recorder."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import rankscope as dist
from rankscope.backends import Backend, OpType, ReduceOp, Store, Work

from .table import Row, duration

__all__ = ["measure"]

BUDGET = 5e-6
OPS = 5_000


class _Null(Backend):
    """A backend whose ops end as soon as they are issued."""

    name = "null"

    def all_reduce(self, tensor: Any, op: ReduceOp) -> Work:
        work = Work(OpType.ALL_REDUCE, tensor)
        work.mark_started()
        work.mark_completed()
        return work


def _create(store: Store, rank: int, size: int, timeout: float) -> Backend:
    return _Null(rank, size)


def measure(rounds: int) -> list[Row]:
    """Return the CPU time of one op on a backend that does nothing, over `rounds`.

    The time of an empty call is subtracted. The two rows have a budget of `BUDGET`.
    """
    Backend.register_backend("null", _create, devices="cpu")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "cpu:null", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            return _rows(rounds)
        finally:
            dist.destroy_process_group()


def _rows(rounds: int) -> list[Row]:
    array = np.zeros(256, dtype=np.float32)

    def nothing(tensor: Any, async_op: bool = False) -> None:
        return None

    def synchronous() -> None:
        dist.all_reduce(array)

    def asynchronous() -> None:
        work = dist.all_reduce(array, async_op=True)
        assert work is not None
        work.wait()

    names = {"all_reduce": synchronous, "all_reduce async_op + wait": asynchronous}
    costs: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        empty = _per_call(lambda: nothing(array))
        for name, op in names.items():
            costs[name].append(_per_call(op) - empty)
    return [
        Row(
            f"dispatch + Work + recorder: CPU of one {name}",
            duration(median(times)),
            "a backend that does nothing",
            "",
            f"≤ {duration(BUDGET)}",
            median(times) <= BUDGET,
        )
        for name, times in costs.items()
    ]


def _per_call(op: Callable[[], None]) -> float:
    op()
    start = time.process_time()
    for _ in range(OPS):
        op()
    return (time.process_time() - start) / OPS
