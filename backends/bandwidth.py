"""How fast an op was: algorithm and bus bandwidth by the formulas of nccl-tests.

See ``doc/PERFORMANCE.md`` of NVIDIA's nccl-tests, and ``*GetBw`` of its tests
for the ops that are not explained there. Pure functions over plain data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .work import OpType

__all__ = ["algbw", "bus_factor", "busbw", "payload"]

# S is what one rank gives, times the number of ranks: nccl-tests counts the
# array that is gathered as a whole.
_TIMES_RANKS = (
    OpType.ALL_GATHER.value,
    OpType.ALL_GATHER_INTO_TENSOR.value,
    OpType.GATHER.value,
)

_SCATTERED = (
    *_TIMES_RANKS,
    OpType.SCATTER.value,
    OpType.REDUCE_SCATTER.value,
    OpType.REDUCE_SCATTER_TENSOR.value,
    OpType.ALL_TO_ALL.value,
    OpType.ALL_TO_ALL_SINGLE.value,
)


def payload(
    op: str, sizes: Sequence[Sequence[int]], itemsize: int, ranks: int
) -> int | None:
    """Return S, the bytes that `op` counts as moving; ``None`` if it moves none.

    `op` is a value of `OpType`; `sizes` are the shapes of its inputs and then
    its outputs on one rank, as the flight recorder has them; `itemsize` is in
    bytes, and `ranks` the size of the group.
    """
    counts = [math.prod(size) for size in sizes]
    if not counts:
        return None
    if op in _TIMES_RANKS:
        count = counts[0] * ranks
    elif op == OpType.SCATTER.value:
        count = counts[-1] * ranks
    elif op == OpType.REDUCE_SCATTER.value:
        count = sum(counts[:-1])
    elif op == OpType.ALL_TO_ALL.value:
        count = sum(counts[:ranks])
    else:
        count = counts[0]
    return count * itemsize


def bus_factor(op: str, ranks: int) -> float:
    """Return what `algbw` is multiplied by to compare it with a link's speed."""
    if ranks < 2:
        return 1.0
    if op == OpType.ALL_REDUCE.value:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in _SCATTERED else 1.0


def algbw(size: int, seconds: float) -> float:
    """Return S/t in GB/s (10⁹ bytes), 0 for an op that took no time at all."""
    return size / seconds / 1e9 if seconds > 0 else 0.0


def busbw(op: str, size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in GB/s: independent of the number of ranks."""
    return algbw(size, seconds) * bus_factor(op, ranks)
