"""Arrays that share memory: refused on every rank, but for what c10d does in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.mpi_ranks import mpiexec, run_mpi_ranks
from rankscope.backends.conformance.ranks import Rank, run_ranks
from tests.backends.backends import HOST_BACKENDS

pytestmark = pytest.mark.processes

SIZE = 3


def whole(size: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return an array and its parts, one for each of `size` ranks."""
    array = np.zeros(SIZE * size)
    return array, list(array.reshape(size, SIZE))


def refused(size: int) -> dict[str, tuple[Callable[[], Any], str]]:
    """Return calls whose arrays overlap, and what their errors have to say."""
    array, parts = whole(size)
    one, other = np.zeros(SIZE), np.zeros(SIZE)
    shifted = [array[i : i + SIZE] for i in range(size)]
    # Not the part of any rank to itself, in a list as long as there are ranks.
    moved = parts[1:] + parts[:1]
    twice = [one] * size
    apart = [np.zeros(SIZE) for _ in range(size)]
    return {
        "all_gather, one array": (
            lambda: dist.all_gather(twice, other),
            "output 1 shares memory with output 0",
        ),
        "all_gather, overlapping slices": (
            lambda: dist.all_gather(shifted, other),
            "output 1 shares memory with output 0",
        ),
        "all_gather, the input in another part": (
            lambda: dist.all_gather(parts, moved[dist.get_rank()]),
            "shares memory with the input",
        ),
        "all_gather_into_tensor, not in its part": (
            lambda: dist.all_gather_into_tensor(array, moved[dist.get_rank()]),
            "the output shares memory with the input",
        ),
        "scatter, another part": (
            lambda: (
                dist.scatter(parts[-1], parts, src=0)
                if dist.get_rank() == 0
                else wrong_too(other)
            ),
            "memory",
        ),
        "reduce_scatter, another part": (
            lambda: dist.reduce_scatter(moved[dist.get_rank()], parts),
            "the output shares memory with input",
        ),
        "reduce_scatter_tensor, another part": (
            lambda: dist.reduce_scatter_tensor(moved[dist.get_rank()], array),
            "the output shares memory with the input",
        ),
        "all_to_all, the same lists shifted": (
            lambda: dist.all_to_all(parts, moved),
            "shares memory with input",
        ),
        "all_to_all, one output": (
            lambda: dist.all_to_all(twice, apart),
            "output 1 shares memory with output 0",
        ),
        "all_to_all_single in place": (
            lambda: dist.all_to_all_single(array, array),
            "the output shares memory with the input",
        ),
        "all_reduce_coalesced": (
            lambda: dist.all_reduce_coalesced([array[:5], array[3:]]),
            "the output shares memory with the output",
        ),
        "all_gather_into_tensor_coalesced": (
            lambda: dist.all_gather_into_tensor_coalesced([array, array], [one, other]),
            "the output shares memory with the output",
        ),
        "a batch that receives into what it sends": (
            lambda: exchange(one, one),
            "the output shares memory with the input",
        ),
    }


def wrong_too(array: np.ndarray) -> None:
    # The root alone has a list; the other ranks must not wait for its scatter.
    dist.all_gather([array] * dist.get_world_size(), array)


def exchange(sent: np.ndarray, received: np.ndarray) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ops = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def in_place(rank: int, size: int) -> None:
    """Do the ops whose output for this rank itself is where its input is."""
    ranks = np.arange(size)
    array, parts = whole(size)
    parts[rank][:] = rank
    dist.all_gather_into_tensor(array, parts[rank])
    np.testing.assert_array_equal(array, ranks.repeat(SIZE))

    array, parts = whole(size)
    parts[rank][:] = rank
    dist.all_gather(parts, parts[rank])
    np.testing.assert_array_equal(array, ranks.repeat(SIZE))

    array, parts = whole(size)
    parts[rank][:] = rank
    dist.gather(parts[rank], parts if rank == 1 else None, dst=1)
    if rank == 1:
        np.testing.assert_array_equal(array, ranks.repeat(SIZE))

    array, parts = whole(size)
    array[:] = ranks.repeat(SIZE)
    dist.scatter(parts[rank], parts if rank == 1 else None, src=1)
    np.testing.assert_array_equal(parts[rank], [rank] * SIZE)

    for length in (SIZE, 50_000):
        array = (np.arange(length * size) + rank).astype(float)
        parts = list(array.reshape(size, length))
        wanted = parts[rank] * size + size * (size - 1) / 2 - rank * size
        again = array.copy()
        dist.reduce_scatter(parts[rank], parts)
        np.testing.assert_array_equal(parts[rank], wanted)
        dist.reduce_scatter_tensor(again.reshape(size, length)[rank], again)
        np.testing.assert_array_equal(again.reshape(size, length)[rank], wanted)

    outputs = [np.full(SIZE, 10.0 * rank + i) for i in range(size)]
    inputs = [one.copy() for one in outputs]
    inputs[rank] = outputs[rank]
    dist.all_to_all(outputs, inputs)
    np.testing.assert_array_equal([one[0] for one in outputs], 10.0 * ranks + rank)

    # What is only read may be given as often as one likes.
    one = np.full(SIZE, float(rank))
    dist.reduce_scatter(np.empty(SIZE), [one] * size)
    dist.all_to_all([np.empty(SIZE) for _ in ranks], [one] * size)
    received = np.empty(SIZE)
    exchange(one, received)
    np.testing.assert_array_equal(received, [(rank - 1) % size] * SIZE)


def program(me: Rank, backend: str) -> list[str]:
    dist.init_process_group(backend, timeout=30)
    in_place(me.rank, me.size)
    tried = []
    for name, (call, words) in refused(me.size).items():
        with pytest.raises(ValueError, match="expected memory of its own") as caught:
            call()
        assert words in str(caught.value), (name, str(caught.value))
        assert f"group 'default' on rank {me.rank}" in str(caught.value)
        tried.append(name)
    # Nothing was sent, and nothing was counted.
    in_place(me.rank, me.size)
    dist.destroy_process_group()
    return tried


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_arrays_that_overlap_are_refused(backend: str) -> None:
    found = run_ranks(3, program, backend, timeout=60)
    assert found == [list(refused(3))] * 3


@pytest.mark.mpi
@pytest.mark.skipif(
    not dist.is_mpi_available() or mpiexec() is None,
    reason="needs mpi4py and mpiexec",
)
def test_arrays_that_overlap_are_refused_over_mpi() -> None:
    assert run_mpi_ranks(3, program, "mpi") == [list(refused(3))] * 3
