"""Which algorithm a collective takes, by the size of its group and of its array.

Measured on a machine of two cores, in turns: all_reduce with MPI (docs/benchmarks.md),
the others with UCX. All ranks choose alike: they have the same size of group, and
arrays of the same size.

The other collectives have one algorithm each; what was tried against them lost, with 4
and with 8 ranks. An all_gather by Bruck's algorithm took as long at 4 B, and 1.5 times
as long from 4 KiB on, as it copies everything twice more. A barrier, and an all_reduce
of 4 B, took 1.3 times as long in one step of messages to all. Bruck's all_to_all is for
parts of one size, and no rank knows the sizes of what the others exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .algorithms import (
    Schedule,
    broadcast,
    broadcast_parts,
    doubling,
    halving,
    reduce_scatter,
    reduce_scatter_at_once,
    ring,
)

__all__ = ["ALL_REDUCE", "BROADCAST", "REDUCE_SCATTER", "Algorithm", "Row", "fitting"]

Algorithm = Callable[..., Schedule]

_ANY = 1 << 62


class Row(NamedTuple):
    """An algorithm, and up to how many ranks and bytes it is taken.

    With `powers_of_two`, by groups of 4, 8, 16, … ranks only: the others would send the
    whole array twice more.
    """

    ranks: int
    nbytes: int
    algorithm: Algorithm
    powers_of_two: bool = False


#: The first row that fits is taken.
ALL_REDUCE = (
    # Two ranks have one step to do either way; above, the halves overlap.
    Row(2, 64 << 10, doubling),
    Row(2, _ANY, ring),
    Row(_ANY, 256 << 10, doubling),
    Row(_ANY, _ANY, halving, powers_of_two=True),
    Row(_ANY, _ANY, ring),
)

#: 16 MiB: 0.8 of the time of the tree with 4 ranks, 0.6 with 8; 1 MiB: 1.4 and 1.5.
BROADCAST = (
    Row(2, _ANY, broadcast),
    Row(_ANY, 8 << 20, broadcast),
    Row(_ANY, _ANY, broadcast_parts),
)

#: By the largest part. 4 KiB: 0.5 of the time of one rank after the other with 4 ranks
#: and 0.4 with 8, 256 KiB: 0.8, 1 MiB: 1.2.
REDUCE_SCATTER = (
    Row(_ANY, 256 << 10, reduce_scatter_at_once),
    Row(_ANY, _ANY, reduce_scatter),
)


def fitting(table: Sequence[Row], size: int) -> list[tuple[int, Algorithm]]:
    """Return algorithms for a group of `size` ranks, and up to how many bytes each."""
    rows: list[tuple[int, Algorithm]] = []
    for row in table:
        if size > row.ranks or (row.powers_of_two and size & (size - 1)):
            continue
        if not rows or row.nbytes > rows[-1][0]:
            rows.append((row.nbytes, row.algorithm))
    return rows
