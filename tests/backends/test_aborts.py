"""Abort on every CPU backend: in each op, in each state, a hundred times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import rankscope as dist
from rankscope.backends import is_gloo_available
from tests.backends import aborts, store_backend
from tests.mpi_ranks import MPIRanks, mpiexec
from tests.ranks import Rank, Ranks

BACKENDS = [
    pytest.param(
        "gloo",
        marks=pytest.mark.skipif(not is_gloo_available(), reason="no pygloo here"),
    ),
    pytest.param(
        "mpi", marks=pytest.mark.skipif(mpiexec() is None, reason="no mpiexec here")
    ),
    "store",
]


@contextmanager
def group(backend: str) -> Iterator[None]:
    """The default group, from what the launcher of the ranks set."""
    store_backend.register()
    dist.init_process_group(f"cpu:{backend}", timeout=60)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(backend: str, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(me, backend, *args)`` on `size` ranks, as the backend needs it."""
    kind = MPIRanks if backend == "mpi" else Ranks
    with kind(size, function, backend, *args, timeout=120) as ranks:
        return ranks.wait()


def in_each_op(me: Rank, backend: str, count: int) -> float:
    with group(backend):
        return aborts.abort_in_each_op(me, count)


@pytest.mark.parametrize("count", [4, 1 << 18])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_waiter_returns_and_the_group_is_rebuilt(
    backend: str, count: int, record_property: Callable[[str, object], None]
) -> None:
    longest = run(backend, 3, in_each_op, count)[0]
    record_property("abort_to_last_waiter_s", longest)
    # Half a second is what is wanted of an idle machine.
    assert longest < 5


def while_running(me: Rank, backend: str) -> int:
    with group(backend):
        return aborts.abort_while_running(me, 16 << 20, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_op_that_all_ranks_are_in(backend: str) -> None:
    assert max(run(backend, 2, while_running)) > 0


def cycles(me: Rank, backend: str) -> tuple[float, int, int]:
    with group(backend):
        return aborts.cycles(me, 100)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hundred_cycles_leak_nothing(backend: str) -> None:
    for mib, threads, descriptors in run(backend, 2, cycles):
        assert mib < 8
        assert threads <= 0
        assert descriptors <= 0
