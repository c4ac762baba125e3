"""Which algorithm an all_reduce takes, by the size of its group and of its array.

Measured with MPI, in turns, on a machine of two cores (docs/benchmarks.md). All ranks
choose alike: they have the same size of group, and arrays of the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .algorithms import Flat, Schedule
from .all_reduce import alone, doubling, halving, ring

__all__ = ["ALL_REDUCE", "Row", "all_reduces", "chooser"]

AllReduce = Callable[..., Schedule]

_ANY = 1 << 62


class Row(NamedTuple):
    """An algorithm, and up to how many ranks and bytes it is taken.

    With `powers_of_two`, by groups of 4, 8, 16, … ranks only: the others would send the
    whole array twice more.
    """

    ranks: int
    nbytes: int
    algorithm: AllReduce
    powers_of_two: bool = False


#: The first row that fits is taken.
ALL_REDUCE = (
    Row(1, _ANY, alone),
    # Two ranks have one step to do either way; above, the halves overlap.
    Row(2, 64 << 10, doubling),
    Row(2, _ANY, ring),
    Row(_ANY, 256 << 10, doubling),
    Row(_ANY, _ANY, halving, powers_of_two=True),
    Row(_ANY, _ANY, ring),
)


def all_reduces(size: int) -> list[tuple[int, AllReduce]]:
    """Return, for a group of `size` ranks, algorithms and up to how many bytes each."""
    fitting: list[tuple[int, AllReduce]] = []
    for row in ALL_REDUCE:
        if size > row.ranks or (row.powers_of_two and size & (size - 1)):
            continue
        if not fitting or row.nbytes > fitting[-1][0]:
            fitting.append((row.nbytes, row.algorithm))
    return fitting


def chooser(size: int) -> Callable[[Flat], AllReduce]:
    """Return what tells the algorithm for an array, in a group of `size` ranks."""
    rows = all_reduces(size)
    smallest = rows[0][1]

    def choose(data: Flat) -> AllReduce:
        # Where an array is cut into parts, every rank has one.
        if data.size < size:
            return smallest
        nbytes = data.nbytes
        for limit, algorithm in rows:
            if nbytes <= limit:
                return algorithm
        return rows[-1][1]

    return choose
