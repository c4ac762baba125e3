"""Memory shared with side processes: one heap of memfd segments per process.

An array of :func:`empty` or :func:`zeros` is in a segment that the side processes map
too, so a collective uses the array in place; any other array is copied through a
block of the same heap. ``memfd_create`` creates the segments: ``/dev/shm`` is often
small in containers, and a write to a full ``/dev/shm`` kills the process by SIGBUS.

The first access to a page costs more than a copy of the page, so freed blocks are
kept and allocated again, the block freed last first. Pages of freed blocks beyond
`Heap.keep` bytes are returned to the system.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Block", "Heap", "Segment", "empty", "heap", "zeros"]

# Address space, not memory: untouched pages of a segment cost nothing.
_SEGMENT_BYTES = 64 << 20
_SMALLEST = 256
_PAGE = mmap.PAGESIZE


class Segment:
    """One mapped memfd of `size` bytes.

    `address` is the address in this process, `number` is unique in this process,
    `used` counts the bytes given to blocks, `live` counts the allocated blocks.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.fd = os.memfd_create(f"rankscope-{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        # An exported buffer prevents a close of the mapping: release() drops the
        # export first.
        self._pin: Any = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._pin)
        self.used = 0
        self.live = 0

    def discard(self, offset: int, size: int) -> None:
        """Return the whole pages of a byte range to the system.

        The pages read as zero afterwards.
        """
        first = -(-offset // _PAGE) * _PAGE
        length = (offset + size) // _PAGE * _PAGE - first
        if length > 0:
            self._map.madvise(mmap.MADV_REMOVE, first, length)

    def release(self) -> None:
        """Unmap and close the segment, which nothing may use any more."""
        self._pin = None
        self._map.close()
        os.close(self.fd)


class Block(NamedTuple):
    """A piece of a segment: `size` bytes from the byte `offset` of `segment`."""

    segment: Segment
    offset: int
    size: int

    @property
    def address(self) -> int:
        """The address of the block in this process."""
        return self.segment.address + self.offset


class Heap:
    """Blocks of shared memory, rounded up to size classes and kept when freed.

    `keep` is the number of bytes of freed blocks that keep their pages.
    """

    def __init__(self, keep: int = 256 << 20) -> None:
        self.keep = keep
        self._lock = threading.Lock()
        self._segments: list[Segment] = []  # in the order of their addresses
        self._addresses: list[int] = []
        self._current: Segment | None = None
        self._made = 0
        self._warm: dict[int, list[Block]] = {}  # freed, by size, with their pages
        self._cold: dict[int, list[Block]] = {}  # freed, pages returned to the system
        self._kept = 0
        # Blocks of deleted arrays. The garbage collector may run a finalizer at any
        # moment, even on a thread that holds the lock: the finalizer only appends.
        self._dead: deque[Block] = deque()

    @property
    def kept(self) -> int:
        """The number of bytes of freed blocks that still have their pages."""
        return self._kept

    @property
    def segments(self) -> int:
        """The number of mapped segments."""
        return len(self._segments)

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least `nbytes` bytes with undefined content."""
        size = _size_class(nbytes)
        with self._lock:
            while self._dead:
                self._put_back(self._dead.popleft())
            if warm := self._warm.get(size):
                block = warm.pop()
                self._kept -= size
            elif cold := self._cold.get(size):
                block = cold.pop()
            else:
                block = self._carve(size)
            block.segment.live += 1
            return block

    def free(self, block: Block) -> None:
        """Free `block`, which nothing reads or writes any more."""
        with self._lock:
            self._put_back(block)

    def free_later(self, block: Block) -> None:
        """Free `block` at the next `allocate` or `trim`; for finalizers: no lock."""
        self._dead.append(block)

    def find(self, address: int, nbytes: int) -> tuple[Segment, int] | None:
        """Return the segment and the offset of `nbytes` bytes at `address`.

        Returns ``None`` for memory outside the segments.
        """
        with self._lock:
            index = bisect_right(self._addresses, address) - 1
            if index < 0:
                return None
            segment = self._segments[index]
        offset = address - segment.address
        return (segment, offset) if offset + nbytes <= segment.size else None

    def trim(self) -> None:
        """Unmap the segments without allocated blocks.

        No side process may use these segments any more.
        """
        with self._lock:
            while self._dead:
                self._put_back(self._dead.popleft())
            gone = [segment for segment in self._segments if not segment.live]
            self._segments = [segment for segment in self._segments if segment.live]
            self._addresses = [segment.address for segment in self._segments]
            if self._current in gone:
                self._current = None
            for free in (self._warm, self._cold):
                for size, blocks in free.items():
                    free[size] = [block for block in blocks if block.segment.live]
            self._kept = sum(size * len(all_) for size, all_ in self._warm.items())
        for segment in gone:
            segment.release()

    def _put_back(self, block: Block) -> None:
        """Make `block` available again; the caller holds the lock."""
        block.segment.live -= 1
        if self._kept + block.size > self.keep:
            block.segment.discard(block.offset, block.size)
            self._cold.setdefault(block.size, []).append(block)
        else:
            self._warm.setdefault(block.size, []).append(block)
            self._kept += block.size

    def _carve(self, size: int) -> Block:
        """Return a block of `size` bytes that was never allocated before."""
        segment = self._current
        if segment is None or segment.used + size > segment.size:
            segment = self._add_segment(max(size, _SEGMENT_BYTES))
            if size < _SEGMENT_BYTES:
                self._current = segment
        block = Block(segment, segment.used, size)
        segment.used += size
        return block

    def _add_segment(self, size: int) -> Segment:
        self._made += 1
        segment = Segment(self._made, size)
        index = bisect_right(self._addresses, segment.address)
        self._segments.insert(index, segment)
        self._addresses.insert(index, segment.address)
        return segment


def _size_class(nbytes: int) -> int:
    """Return `nbytes` rounded up to 1, 1¼, 1½ or 1¾ times a power of two.

    At least 256; above 256 bytes, at most a fifth of the block is unused.
    """
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << max((nbytes - 1).bit_length() - 3, 6)
    return -(-nbytes // step) * step


#: The heap of this process.
heap = Heap()


class _Memory:
    """The base of all arrays on one block; the deletion of the base frees the block."""

    __slots__ = ("__array_interface__", "_block")

    def __init__(self, block: Block, nbytes: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "data": (block.address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        heap.free_later(self._block)


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Return an uninitialized array in shared memory, C-contiguous.

    Collectives of CPU backends that run in a side process (gloo) use the array in
    place: no byte is copied in or out. Otherwise the array is a plain `numpy.ndarray`.
    The deletion of the last view frees the memory.

    Parameters
    ----------
    shape : int or sequence of int
        The length, or the length along each dimension.
    dtype : dtype, default float32
        Any fixed-size dtype without objects.

    Returns
    -------
    numpy.ndarray
        The array.

    Raises
    ------
    TypeError
        The dtype has objects.
    ValueError
        A length is negative.

    Notes
    -----
    Named after ``numpy.empty``, whose default dtype is another one.

    Examples
    --------
    >>> x = dist.empty((2, 3))
    >>> x.shape, x.dtype
    ((2, 3), dtype('float32'))
    """
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"empty: dtype {kind} holds objects, which cannot be shared")
    extents = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"empty: negative extent in shape {extents}")
    nbytes = kind.itemsize
    for extent in extents:
        nbytes *= int(extent)
    if nbytes == 0:
        return np.empty(extents, kind)
    memory: Any = _Memory(heap.allocate(nbytes), nbytes)
    return np.asarray(memory).view(kind).reshape(extents)


def zeros(shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Return an array of zeros in shared memory; see `empty`.

    Parameters
    ----------
    shape : int or sequence of int
        The length, or the length along each dimension.
    dtype : dtype, default float32
        Any fixed-size dtype without objects.

    Returns
    -------
    numpy.ndarray
        The array.

    Raises
    ------
    TypeError, ValueError
        As of `empty`.

    Examples
    --------
    >>> dist.zeros(3)
    array([0., 0., 0.], dtype=float32)
    """
    array = empty(shape, dtype)
    array.fill(0)
    return array
