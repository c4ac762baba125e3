"""Parts of arrays, and the records by which a message names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .operations import PlacedOperation
from .side.wire import Piece, Transfer

__all__ = ["Move", "Region", "copy", "piece", "rows", "transfer", "whole"]


class Region(NamedTuple):
    """`length` elements of the flattened `array`, from element `start`."""

    array: np.ndarray
    start: int
    length: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.length * self.array.itemsize


class Move(NamedTuple):
    """What is sent to `peer` and what is received from it; ``None``: nothing."""

    peer: int
    source: Region | None
    target: Region | None


def whole(array: np.ndarray) -> Region:
    """Return the region that is all of `array`."""
    return Region(array, 0, array.size)


def rows(array: np.ndarray, sizes: Sequence[int]) -> list[Region]:
    """Split `array` along dimension 0 into `sizes` rows each."""
    width = array[:1].size if array.ndim else 1
    regions, start = [], 0
    for size in sizes:
        regions.append(Region(array, start, size * width))
        start += size * width
    return regions


def copy(source: Region, target: Region) -> None:
    """Copy a region to another of this rank."""
    target.array.reshape(-1)[target.start : target.start + target.length] = (
        source.array.reshape(-1)[source.start : source.start + source.length]
    )


def transfer(operation: PlacedOperation, move: Move) -> Transfer:
    """Place the arrays of `move`; return its record."""
    peer, source, target = move
    return Transfer(
        peer,
        *((0, 0) if source is None else _place(operation, source, load=True)),
        0 if source is None else source.nbytes,
        *((0, 0) if target is None else _place(operation, target, store=True)),
        0 if target is None else target.nbytes,
    )


def piece(operation: PlacedOperation, region: Region, factor: int) -> Piece:
    """Place an input of a reduce-scatter; return its record.

    `factor` elements of gloo's dtype make one element of the array.
    """
    segment, offset = _place(operation, region, load=True)
    return Piece(segment, offset, region.length * factor)


def _place(
    operation: PlacedOperation,
    region: Region,
    *,
    load: bool = False,
    store: bool = False,
) -> tuple[int, int]:
    size = region.array.itemsize
    return operation.place(
        region.array, region.start * size, region.length * size, load=load, store=store
    )
