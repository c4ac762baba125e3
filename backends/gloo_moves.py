"""Parts of arrays, and which of them go from whom to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .gloo_protocol import Piece, Transfer
from .gloo_work import PlacedOperation

__all__ = ["Move", "Region", "copy", "piece", "rows", "transfer", "whole"]


class Region(NamedTuple):
    """`length` elements of `array` from element `start`, counted flat."""

    array: np.ndarray
    start: int
    length: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.length * self.array.itemsize


class Move(NamedTuple):
    """What goes to `peer`, and what comes from there; ``None``: nothing."""

    peer: int
    source: Region | None
    target: Region | None


def whole(array: np.ndarray) -> Region:
    """All of `array`."""
    return Region(array, 0, array.size)


def rows(array: np.ndarray, sizes: Sequence[int]) -> list[Region]:
    """`array` split along dimension 0."""
    width = array[:1].size if array.ndim else 1
    regions, start = [], 0
    for size in sizes:
        regions.append(Region(array, start, size * width))
        start += size * width
    return regions


def copy(source: Region, target: Region) -> None:
    """Copy within this rank."""
    target.array.reshape(-1)[target.start : target.start + target.length] = (
        source.array.reshape(-1)[source.start : source.start + source.length]
    )


def transfer(operation: PlacedOperation, move: Move) -> Transfer:
    """The record of `move`, whose arrays get their places."""
    peer, source, target = move
    return Transfer(
        peer,
        *((0, 0) if source is None else _place(operation, source, load=True)),
        0 if source is None else source.nbytes,
        *((0, 0) if target is None else _place(operation, target, store=True)),
        0 if target is None else target.nbytes,
    )


def piece(operation: PlacedOperation, region: Region, factor: int) -> Piece:
    """The record of an input of a reduce-scatter, `factor` numbers per element."""
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
