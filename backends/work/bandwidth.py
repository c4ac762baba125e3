"""How fast an op was: algorithm and bus bandwidth by the formulas of nccl-tests.

See ``doc/PERFORMANCE.md`` of NVIDIA's nccl-tests, and ``*GetBw`` of its tests
for the ops that are not explained there. Pure functions over plain data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .op_type import spec_of

__all__ = ["algbw", "bus_factor", "busbw", "payload"]


def payload(
    op: str, sizes: Sequence[Sequence[int]], itemsize: int, ranks: int
) -> int | None:
    """Return S, the bytes that `op` counts as moving; ``None`` if it moves none.

    `op` is a value of `OpType`, `sizes` are the shapes of its inputs and then
    its outputs on one rank, as the flight recorder has them; `itemsize` is in
    bytes, and `ranks` the size of the group.
    """
    counts = [math.prod(size) for size in sizes]
    if not counts:
        return None
    return spec_of(op).payload(counts, ranks) * itemsize


def bus_factor(op: str, ranks: int) -> float:
    """Return what `algbw` is multiplied by to compare it with a link's speed."""
    return spec_of(op).bus_factor(ranks) if ranks > 1 else 1.0


def algbw(size: int, seconds: float) -> float:
    """Return S/t in GB/s (10⁹ bytes), 0 for an op that took no time at all."""
    return size / seconds / 1e9 if seconds > 0 else 0.0


def busbw(op: str, size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in GB/s: independent of the number of ranks."""
    return algbw(size, seconds) * bus_factor(op, ranks)
