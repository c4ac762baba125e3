"""The collectives that gloo does, piece by piece through the shared memory.

They run as tasks of a `SideProcess`. Arrays are flat, and as long on every rank: the
ranks cut them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..messaging.algorithms import Ufunc
from .side_process import MEMORY_BYTES, SideProcess

__all__ = ["Reduction", "all_gather", "all_reduce", "broadcast", "reduce", "reduces"]

Flat = npt.NDArray[Any]

# The dtypes of gloo, by numpy's names. Its float16 is left out: it is slow, and rounds
# after each rank.
_INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
_REDUCTIONS = {
    **dict.fromkeys(_INTEGERS, ("SUM", "PRODUCT", "MIN", "MAX")),
    # gloo's MIN and MAX of floats ignore some NaN, which numpy's give back.
    **dict.fromkeys(("float32", "float64"), ("SUM", "PRODUCT")),
}

# A second array begins at a multiple of this.
_ALIGNMENT = 64


class Reduction(NamedTuple):
    """A reduction, as numpy has it and, in its own words, gloo."""

    ufunc: Ufunc
    dtype: str
    name: str


def reduces(reduction: Reduction) -> bool:
    """Whether gloo computes what numpy would."""
    return reduction.name in _REDUCTIONS.get(reduction.dtype, ())


def all_reduce(side: SideProcess, array: Flat, op: Reduction) -> None:
    """Reduce `array` over all ranks, in place."""
    for piece in _pieces(array, 1):
        side.load(piece)
        side.call("all_reduce", piece.size, op.dtype, op.name)
        side.store(piece)


def reduce(
    side: SideProcess, array: Flat, op: Reduction, root: int, here: bool
) -> None:
    """Reduce into `array` of `root`, which this rank is if `here`."""
    for piece in _pieces(array, 2):
        side.load(piece)
        output = _aligned(piece.nbytes)
        side.call("reduce", piece.size, op.dtype, op.name, root, output)
        if here:
            side.store(piece, output)


def broadcast(side: SideProcess, array: Flat, root: int, here: bool) -> None:
    """Copy `array` of `root`, which this rank is if `here`, to every rank."""
    for piece in _pieces(array.view(np.uint8), 1):
        if here:
            side.load(piece)
        side.call("broadcast", piece.size, root=root, moved=array.dtype.name)
        if not here:
            side.store(piece)


def all_gather(side: SideProcess, outputs: Sequence[Flat], array: Flat) -> None:
    """Set each of `outputs` to `array` of its rank; all have one size."""
    targets = [_pieces(output.view(np.uint8), len(outputs) + 1) for output in outputs]
    for piece, *parts in zip(
        _pieces(array.view(np.uint8), len(outputs) + 1), *targets, strict=True
    ):
        side.load(piece)
        start = _aligned(piece.size)
        side.call("all_gather", piece.size, output=start, moved=array.dtype.name)
        for rank, part in enumerate(parts):
            side.store(part, start + rank * piece.size)


def _pieces(array: Flat, shares: int) -> Iterator[Flat]:
    """Yield pieces of which the shared memory holds `shares`, and the alignment."""
    step = (MEMORY_BYTES - _ALIGNMENT) // shares // array.itemsize
    for start in range(0, array.size, step):
        yield array[start : start + step]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
