"""The heap of shared memory: reuse, bounds, and arrays that keep it alive."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rankscope.backends.devices import shared_memory as shared
from rankscope.backends.devices.shared_memory import Heap, empty, zeros


@pytest.fixture(autouse=True)
def _unmapped() -> Iterator[None]:
    yield
    gc.collect()
    shared.heap.trim()


@contextlib.contextmanager
def a_heap(**options: int) -> Iterator[Heap]:
    """A heap that is unmapped at the end, whatever lives in it."""
    made = Heap(**options)
    yield made
    for segment in made._segments:
        segment.live = 0
    made.trim()


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "complex128", "float64"])
@pytest.mark.parametrize("shape", [(), 0, 7, (3, 0, 2), (2, 3, 5)])
def test_an_array_is_a_plain_one_of_its_shape(dtype: str, shape: Any) -> None:
    array = zeros(shape, dtype)
    expected = np.zeros(shape, dtype)
    assert type(array) is np.ndarray
    assert array.shape == expected.shape
    assert array.dtype == expected.dtype
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert np.array_equal(array, expected)


def test_every_part_of_an_array_is_found() -> None:
    array = empty((100, 1000), np.float64)
    segment, offset = shared.heap.find(address(array), array.nbytes) or (None, 0)
    assert segment is not None
    row = array[37, 5:]
    assert shared.heap.find(address(row), row.nbytes) == (
        segment,
        offset + (37 * 1000 + 5) * 8,
    )
    outside = np.empty(100)
    assert shared.heap.find(address(outside), outside.nbytes) is None


def test_memory_lives_as_long_as_the_last_view() -> None:
    array = zeros(10_000, np.int64)
    view = array[5_000:].reshape(50, 100)
    at = address(array)
    del array
    gc.collect()
    others = [zeros(10_000, np.int64) for _ in range(5)]
    for other in others:
        other.fill(1)
    assert at not in [address(other) for other in others]
    assert not view.any()
    del view
    assert address(empty(10_000, np.int64)) == at


def test_freed_blocks_are_handed_out_again_the_last_one_first() -> None:
    with a_heap() as heap:
        first, second = heap.allocate(5000), heap.allocate(5000)
        heap.free(first)
        heap.free(second)
        assert heap.allocate(5100) == second
        assert heap.allocate(4900) == first


def test_what_is_kept_is_bounded_and_reads_as_zero_when_it_was_given_back() -> None:
    with a_heap(keep=3 << 20) as heap:
        blocks = [heap.allocate(1 << 20) for _ in range(8)]
        for block in blocks:
            np.frombuffer(block.segment._map, np.uint8, block.size, block.offset)[:] = 7
            heap.free(block)
        assert heap.kept == 3 << 20
        again = [heap.allocate(1 << 20) for _ in range(8)]
        assert {b.offset for b in again} == {b.offset for b in blocks}
        values = [int(block.segment._map[block.offset]) for block in again]
        assert sorted(values) == [0, 0, 0, 0, 0, 7, 7, 7]


def test_trim_unmaps_what_nothing_lives_in() -> None:
    heap = Heap()
    before = len(os.listdir("/proc/self/fd"))
    small, big = heap.allocate(1000), heap.allocate(200 << 20)
    assert heap.segments == 2
    heap.free(big)
    heap.trim()
    assert heap.segments == 1
    assert heap.find(small.address, 1000) == (small.segment, small.offset)
    heap.free(small)
    heap.trim()
    assert heap.segments == 0
    assert heap.kept == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_more_than_a_fifth_is_wasted() -> None:
    for nbytes in [257, 1000, 4097, 65537, (1 << 20) + 1, 3 << 20, 100_000_007]:
        size = shared._size_class(nbytes)
        assert nbytes <= size <= 1.25 * nbytes + 64


def test_objects_and_negative_extents_are_refused() -> None:
    with pytest.raises(TypeError, match="holds objects"):
        empty(3, object)
    with pytest.raises(ValueError, match="negative extent"):
        empty((2, -1))
