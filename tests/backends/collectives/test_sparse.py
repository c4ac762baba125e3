"""Sparse all_reduce beside other ops, aborted, and with arrays that do not match."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import rankscope as dist
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.backends.groups.watchdog import watchdog
from rankscope.backends.stores.hash import HashStore
from tests.backends import store_backend

SIZE = 3


class Threads:
    """The ranks of a group over a store, which are threads of this process."""

    def __init__(self, timeout: float = 30) -> None:
        store_backend.register()
        self._store = HashStore()
        config = BackendConfig("store")
        self.groups = [
            ProcessGroup("sparse", range(SIZE), rank, config, self._store, timeout)
            for rank in range(SIZE)
        ]
        self._pool = ThreadPoolExecutor(SIZE)

    def start(self, body: Callable[[ProcessGroup], Any]) -> list[Future[Any]]:
        return [self._pool.submit(body, group) for group in self.groups]

    def __call__(self, body: Callable[[ProcessGroup], Any]) -> list[Any]:
        return [one.result(60) for one in self.start(body)]

    def close(self) -> None:
        for group in self.groups:
            group.abort("the test is over")
        self._pool.shutdown()
        self._store.close()
        watchdog.stop()


@pytest.fixture
def ranks() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close()


def of(rank: int, scale: int = 1) -> Any:
    """Return an array with its own pattern on each rank; one of rank 0 is empty."""
    x = sp.random_array((50, 40), density=0.05 * rank, rng=rank, format="csr")
    return x * scale


def total(scale: int = 1) -> Any:
    return sum(of(rank, scale).toarray() for rank in range(SIZE))


def test_asynchronous_sums_keep_no_other_op_waiting(ranks: Threads) -> None:
    # Rank 0 sends after it has issued the sums; the others issue theirs only when they
    # have that message. Sums that took two places among the collectives, or that
    # blocked, would never end.
    def body(pg: ProcessGroup) -> None:
        note, dense = np.zeros(1), np.ones(4)
        if pg.rank():
            dist.recv(note, 0 if pg.rank() == 1 else 1, pg)
        sums = [of(pg.rank(), scale) for scale in (1, 2)]
        works = [dist.all_reduce(x, group=pg, async_op=True) for x in sums]
        if pg.rank() < SIZE - 1:
            dist.send(note, pg.rank() + 1, pg)
        dist.all_reduce(dense, group=pg)
        np.testing.assert_array_equal(dense, SIZE)
        for scale, x, work in zip((1, 2), sums, works, strict=True):
            assert work is not None
            assert work.get_future().wait(30) == [x]
            np.testing.assert_allclose(x.toarray(), total(scale))
        assert [work.sequence_number for work in works if work] == [1, 2]
        assert pg.status.in_flight == {}

    ranks(body)


def test_the_tags_of_many_sums_are_used_again(ranks: Threads) -> None:
    def body(pg: ProcessGroup) -> None:
        for _ in range(270):
            x = sp.csr_array(np.eye(2) * (pg.rank() + 1))
            dist.all_reduce(x, group=pg)
            np.testing.assert_array_equal(x.toarray(), np.eye(2) * 6)

    ranks(body)


def test_a_hung_sum_ends_with_an_abort(ranks: Threads) -> None:
    entered = threading.Barrier(SIZE)

    def body(pg: ProcessGroup) -> str:
        x = of(pg.rank())
        before = x.toarray()
        works = []
        if pg.rank():
            works.append(dist.all_reduce(x, group=pg, async_op=True))
        entered.wait(30)
        if not pg.rank():
            pg.abort("enough")
            return "enough"
        (work,) = works
        assert work is not None
        with pytest.raises(dist.DistAbortedError) as raised:
            work.wait(30)
        np.testing.assert_array_equal(x.toarray(), before)
        return str(raised.value)

    assert all("enough" in text for text in ranks(body))


def test_a_sum_that_a_rank_leaves_out_times_out() -> None:
    ranks = Threads(timeout=0.5)

    def body(pg: ProcessGroup) -> None:
        if not pg.rank():
            return
        with pytest.raises(dist.DistError, match="all_reduce #1 .* 0.5 s"):
            dist.all_reduce(of(pg.rank()), group=pg)

    try:
        ranks(body)
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda rank: sp.csr_array((2 + (rank == 1), 3)), "2x3 of float64 on"),
        (lambda rank: sp.csr_array((2, 3), dtype="fi"[rank == 1] + "4"), "int32 on"),
    ],
    ids=["shape", "dtype"],
)
def test_arrays_that_differ_fail_on_every_rank(
    ranks: Threads, make: Callable[[int], Any], match: str
) -> None:
    def body(pg: ProcessGroup) -> str:
        with pytest.raises(dist.DistBackendError, match="one shape and dtype") as info:
            dist.all_reduce(make(pg.rank()), group=pg)
        assert info.value.op == "all_reduce"
        after = np.ones(1)
        dist.all_reduce(after, group=pg)
        return f"{info.value}; {after[0]:g}"

    texts = ranks(body)
    assert all(match in text and text.endswith("; 3") for text in texts), texts


def test_what_is_refused_has_no_number(ranks: Threads) -> None:
    pg = ranks.groups[0]
    with pytest.raises(ValueError, match="coalescing_manager block"):  # noqa: SIM117
        with dist.coalescing_manager(pg):
            dist.all_reduce(of(0), group=pg)
    with pytest.raises(ValueError, match="1 dimensions; expected 2"):
        dist.all_reduce(sp.coo_array(np.ones(3)), group=pg)
    with pytest.raises(ValueError, match="summed only"):
        dist.all_reduce(of(0), dist.ReduceOp.MAX, pg)
    assert pg.status.collective_seq == 0
