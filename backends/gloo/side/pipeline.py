"""Parts of the side process's collectives: chunks, scratch memory, reductions."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

from .abi import Reduction

__all__ = ["ITEM_BYTES", "Chunks", "Scratch", "Whole", "accumulate", "pipeline"]

#: Element sizes, as passed, in the order of DTYPES.
ITEM_BYTES = (1, 1, 4, 4, 8, 8, 4, 4, 8, 4, 4, 4)


class Chunks(Protocol):
    """Flow control: whether the rank has made room for a chunk of an op."""

    def ready(self, chunk: int) -> bool:
        """Whether `chunk` may be used now."""

    def need(self, chunk: int) -> None:
        """Wait until `chunk` may be used."""

    def done(self, chunk: int) -> None:
        """Report to the rank that `chunk` is over."""


class Whole:
    """The chunks of an op that passes through no slots."""

    def ready(self, chunk: int) -> bool:
        return True

    def need(self, chunk: int) -> None: ...

    def done(self, chunk: int) -> None: ...


def pipeline(
    total: int,
    chunks: Chunks,
    begin: Callable[[int], None],
    advance: Callable[[int], None],
    finish: Callable[[int], None] = lambda chunk: None,
) -> None:
    """Run the three steps of each chunk; the next has begun while one advances.

    A chunk is waited for only after all but the last one before it are
    finished, so two slots are enough.
    """
    begun = 0
    for chunk in range(total):
        if begun == chunk:
            chunks.need(chunk)
            begin(chunk)
            begun += 1
        if begun < total and chunks.ready(begun):
            begin(begun)
            begun += 1
        advance(chunk)
        if chunk:
            finish(chunk - 1)
            chunks.done(chunk - 1)
    finish(total - 1)


def accumulate(
    reduction: Reduction, result: int, parts: Sequence[int], count: int, spare: int
) -> None:
    """Reduce `parts` in the order of the ranks: the same bits on every rank.

    `result` may be one of `parts`: it is written last. `spare` is none of them.
    """
    *heads, last = parts
    so_far = heads[0]
    for part in heads[1:]:
        reduction(spare, so_far, part, count)
        so_far = spare
    reduction(result, so_far, last, count)


class Scratch:
    """Memory of this process for received data, kept from op to op."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._pin: object = None
        self._address = 0
        self._size = 0

    def reserve(self, nbytes: int) -> int:
        """Return the address of `nbytes`, good until the next call."""
        if nbytes > self._size:
            self._pin = None
            if self._map is not None:
                self._map.close()
            self._size = max(1 << 16, 1 << (nbytes - 1).bit_length())
            self._map = mmap.mmap(-1, self._size)
            pin = ctypes.c_char.from_buffer(self._map)
            self._pin, self._address = pin, ctypes.addressof(pin)
        return self._address
