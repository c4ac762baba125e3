"""Ranks stay in step: with nothing to send, and after a call that one rank refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rankscope as dist
from rankscope.backends.conformance.mpi_ranks import mpiexec, run_mpi_ranks
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.backends.stores.hash import HashStore
from rankscope.backends.tcp.backend import TCPBackend
from tests.backends import gpu_ranks

SIZE = 3

#: Elements that each rank (row) sends to each rank.
Sizes = Sequence[Sequence[int]]
sizes = st.lists(
    st.lists(st.sampled_from([0, 0, 0, 1, 5, 3000]), min_size=SIZE, max_size=SIZE),
    min_size=SIZE,
    max_size=SIZE,
)
settled = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Threads:
    """The ranks of a tcp group, which are threads of this process."""

    def __init__(self) -> None:
        self.store = HashStore()
        config = BackendConfig("tcp")
        self.groups = [
            ProcessGroup("in step", range(SIZE), rank, config, self.store, 20)
            for rank in range(SIZE)
        ]
        self._pool = ThreadPoolExecutor(SIZE)

    def __call__(self, body: Callable[[ProcessGroup], Any]) -> list[Any]:
        return [
            one.result(60) for one in [self._pool.submit(body, g) for g in self.groups]
        ]

    def close(self) -> None:
        for group in self.groups:
            group.abort("the test is over")
        self._pool.shutdown()
        self.store.close()


@pytest.fixture(scope="module")
def tcp() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close()


def exchange(
    pg: ProcessGroup,
    given_sizes: Sizes,
    single: bool,
    array: Callable[[Any], Any] = np.asarray,
) -> None:
    """Exchange parts of these sizes; then an all_reduce shows that all are in step."""
    me = pg.rank()
    sends = list(given_sizes[me])
    receives = [row[me] for row in given_sizes]
    parts = [np.full(count, 10.0 * me + to) for to, count in enumerate(sends)]
    expected = [np.full(count, 10.0 * frm + me) for frm, count in enumerate(receives)]
    if single:
        output = array(np.zeros(sum(receives)))
        # numpy's integers, as they come from a computation of the splits.
        splits: Any = np.array(receives)
        dist.all_to_all_single(
            output, array(np.concatenate(parts)), splits, sends, group=pg
        )
        outputs = [output]
        expected = [np.concatenate(expected)]
    else:
        outputs = [array(np.zeros(count)) for count in receives]
        dist.all_to_all(outputs, [array(part) for part in parts], group=pg)
    total = array(np.full(2, me + 1.0))
    dist.all_reduce(total, group=pg)
    dist.barrier(group=pg)
    assert np.asarray(total).tolist() == [6.0, 6.0]
    for out, values in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(out), values)


@settled
@given(sizes, st.booleans())
def test_parts_without_an_element_over_tcp(
    tcp: Threads, given_sizes: Sizes, single: bool
) -> None:
    tcp(lambda pg: exchange(pg, given_sizes, single))


def test_parts_without_an_element_over_nccl(ranks: gpu_ranks.Ranks) -> None:
    ranks.start(SIZE)

    @settled
    @given(sizes, st.booleans())
    def exchanged(given_sizes: Sizes, single: bool) -> None:
        def body(r: gpu_ranks.Rank) -> None:
            exchange(r.pg, given_sizes, single, r.array)
            r.synchronize()

        ranks(body)

    exchanged()


def over_messages(me: Rank, backend: str) -> None:
    dist.init_process_group(f"cpu:{backend}", timeout=30)
    group = dist.group.WORLD
    assert group is not None
    # The same on every rank.
    choose = random.Random(16)
    for turn in range(40):
        drawn = [[choose.choice([0, 0, 1, 3000]) for _ in range(SIZE)] for _ in "012"]
        exchange(group, drawn, bool(turn % 2))
    pass_empty_messages(group)
    stays_in_step_after_refusals(group, me.meet)
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.mpi
@pytest.mark.skipif(
    not dist.is_mpi_available() or mpiexec() is None, reason="needs mpi4py and mpiexec"
)
def test_ranks_stay_in_step_over_mpi() -> None:
    run_mpi_ranks(SIZE, over_messages, "mpi")


@pytest.mark.processes
@pytest.mark.skipif(dist.unavailable_reason("ucx") is not None, reason="needs UCX")
def test_ranks_stay_in_step_over_ucx() -> None:
    run_ranks(SIZE, over_messages, "ucx")


# -- messages ----------------------------------------------------------------------


def pass_empty_messages(pg: ProcessGroup) -> None:
    """A message without an element is one: it is waited for, and has a sender."""
    empty = np.empty(0)
    if pg.rank():
        work = dist.irecv(empty, group=pg, tag=pg.rank())
        with pytest.raises(dist.DistTimeoutError, match="still in flight"):
            work.wait(0.02)
        dist.barrier(group=pg)
        work.wait()
        assert work.result() == 0
    else:
        dist.barrier(group=pg)
        for peer in range(1, pg.size()):
            dist.send(empty, group_dst=peer, group=pg, tag=peer)


def test_a_message_without_an_element_over_tcp(tcp: Threads) -> None:
    tcp(pass_empty_messages)


def test_a_message_that_should_have_no_element_stays_in_no_queue() -> None:
    def send(pg: ProcessGroup, value: float) -> None:
        dist.send(np.full(2, value), group_dst=1, group=pg)

    def refused(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            send(pg, 1.0)
        if pg.rank() == 1:
            with pytest.raises(dist.DistError, match="16 bytes where 0 were expected"):
                dist.recv(np.empty(0), group_src=0, group=pg)

    def received(pg: ProcessGroup) -> None:
        dist.rebuild_process_group(pg)
        if pg.rank() == 0:
            send(pg, 2.0)
        if pg.rank() == 1:
            x = np.zeros(2)
            dist.recv(x, group_src=0, group=pg)
            assert x.tolist() == [2.0, 2.0]

    with contextlib.closing(Threads()) as ranks:
        ranks(refused)
        ranks(received)


# -- refusals ------------------------------------------------------------------------

_F8 = np.float64
_READ_ONLY = np.ones(SIZE)
_READ_ONLY.flags.writeable = False

#: Arrays, lists, peers and numbers that no op takes in the place of a good one.
BAD_ARRAYS: list[Any] = [
    *(None, 3.5, "x", [1.0], object(), _F8(1)),
    np.ones((SIZE, 4), _F8)[:, ::2],
    *(np.ones(SIZE, object), np.ones(SIZE, ">f8"), np.ones(SIZE, "M8[s]")),
]
BAD_LISTS: list[Any] = [
    *(None, (), [], 3, "abc", np.ones(3), [np.ones(1)] * (SIZE + 1)),
    [np.ones(1), np.ones(1, np.int8), None],
]
BAD_PEERS: list[Any] = [SIZE, -1, 1.5, "0", [0], 10**30]
BAD_OPS: list[Any] = [None, "sum", 0, dist.ReduceOp]
BAD_SPLITS: list[Any] = [
    *([1, 1], [1, 1, 2], [3, -1, 1], [0.5, 0.5, 2.0], ["1", "1", "1"], "111"),
    [10**30, 1, 1],
    np.array([1.0, 1.0, 1.0]),
]


def _vector() -> np.ndarray:
    return np.ones(SIZE)


def _parts() -> list[np.ndarray]:
    return [np.ones(1) for _ in range(SIZE)]


def bad_calls(rank: int) -> Iterator[partial[Any]]:
    """Calls of each op with one bad argument, and the others as they should be."""
    other = (rank + 1) % SIZE
    for bad in BAD_ARRAYS:
        yield partial(dist.all_reduce, bad)
        yield partial(dist.broadcast, bad, group_src=other)
        yield partial(dist.reduce, bad, group_dst=other)
        yield partial(dist.all_gather, _parts(), bad)
        yield partial(dist.all_gather_into_tensor, _vector(), bad)
        yield partial(dist.all_gather_into_tensor, bad, np.ones(1))
        yield partial(dist.gather, bad, group_dst=other)
        yield partial(dist.scatter, bad, group_src=other)
        yield partial(dist.reduce_scatter, bad, _parts())
        yield partial(dist.reduce_scatter_tensor, bad, _vector())
        yield partial(dist.reduce_scatter_tensor, np.ones(1), bad)
        yield partial(dist.all_to_all_single, bad, _vector())
        yield partial(dist.all_to_all_single, _vector(), bad)
        yield partial(dist.isend, bad, group_dst=other)
        yield partial(dist.irecv, bad, group_src=other)
    for bad in BAD_LISTS:
        yield partial(dist.all_gather, bad, np.ones(1))
        yield partial(dist.reduce_scatter, np.ones(1), bad)
        yield partial(dist.all_to_all, bad, _parts())
        yield partial(dist.all_to_all, _parts(), bad)
        yield partial(dist.gather, np.ones(1), bad, group_dst=rank)
        yield partial(dist.scatter, np.ones(1), bad, group_src=rank)
    for bad in BAD_PEERS:
        yield partial(dist.broadcast, _vector(), group_src=bad)
        yield partial(dist.reduce, _vector(), group_dst=bad)
        yield partial(dist.isend, _vector(), group_dst=bad)
        yield partial(dist.irecv, _vector(), group_src=bad)
        yield partial(dist.isend, _vector(), bad)
    yield partial(dist.isend, _vector(), group_dst=rank)
    yield partial(dist.irecv, _vector(), group_src=rank)
    for bad in BAD_OPS:
        yield partial(dist.all_reduce, _vector(), bad)
        yield partial(dist.reduce, _vector(), group_dst=other, op=bad)
        yield partial(dist.reduce_scatter_tensor, np.ones(1), _vector(), bad)
    for bad in BAD_SPLITS:
        yield partial(dist.all_to_all_single, _vector(), _vector(), bad)
        yield partial(dist.all_to_all_single, _vector(), _vector(), None, bad)
    tags: list[Any] = [-1, 1.5, "x", None, 2**80, 2**60]
    for tag in tags:
        yield partial(dist.isend, _vector(), group_dst=other, tag=tag)
        yield partial(dist.irecv, _vector(), group_src=other, tag=tag)
    yield partial(dist.all_reduce, _READ_ONLY)
    yield partial(dist.broadcast, _READ_ONLY, group_src=other)
    yield partial(dist.all_gather, [_READ_ONLY] * SIZE, _vector())
    yield partial(dist.all_gather_into_tensor, np.ones(4), np.ones(1))
    yield partial(dist.reduce_scatter_tensor, np.ones(2), _vector())
    for device in ("tpu", 3, "cuda:x", ""):
        yield partial(dist.barrier, device=device)
    yield partial(dist.barrier, device_ids=[0, 1])
    no_list: Any = 1
    yield partial(dist.barrier, device_ids=no_list)
    two = np.ones(2)
    yield partial(dist.all_to_all_single, two, two, output_split_sizes=no_list)


_ASYNC = {dist.isend, dist.irecv}


def stays_in_step_after_refusals(pg: ProcessGroup, meet: Callable[[str], None]) -> None:
    """Each call that rank 1 refuses leaves the group as if nobody had called."""
    meet("before")
    if pg.rank() == 1:
        for call in bad_calls(pg.rank()):
            how = {} if call.func in _ASYNC else {"async_op": True}
            before = pg.status.collective_seq, pg.status.p2p_seq, pg.status.op_id
            with pytest.raises((TypeError, ValueError)):
                pytest.fail(f"{call} gave {call(group=pg, **how)!r}")
            after = pg.status.collective_seq, pg.status.p2p_seq, pg.status.op_id
            assert before == after, call
    meet("after")
    total = np.ones(4)
    dist.all_reduce(total, group=pg)
    assert total.tolist() == [SIZE] * 4
    numbers: list[Any] = [None] * SIZE
    dist.all_gather_object(numbers, pg.status.collective_seq, group=pg)
    assert len(set(numbers)) == 1


def test_refused_arguments_over_tcp(tcp: Threads) -> None:
    tcp(lambda pg: stays_in_step_after_refusals(pg, lambda name: None))


def test_refused_arguments_over_nccl(ranks: gpu_ranks.Ranks) -> None:
    ranks.start(SIZE)

    def body(r: gpu_ranks.Rank) -> None:
        before = r.pg.status.op_id
        if r.rank == 1:
            for call in (
                lambda: dist.isend(r.array([1.0]), group_dst=0, tag=1, group=r.pg),
                lambda: dist.irecv(r.array([1.0]), group=r.pg),
                # Of two devices.
                lambda: dist.all_gather_into_tensor(
                    r.simulation.array(np.ones(3), 0), r.array([1.0]), group=r.pg
                ),
            ):
                with pytest.raises(ValueError, match=r"tag|any rank|devices"):
                    call()
        assert r.pg.status.op_id == before
        r.all_reduce().wait()
        r.synchronize()

    ranks(body)
    assert {r.pg.status.collective_seq for r in ranks.ranks} == {1}


def test_an_op_without_memory_on_one_rank(
    tcp: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(self: TCPBackend, tensor: Any, src: int) -> Any:
        raise MemoryError(f"{tensor.nbytes} bytes")

    def refused(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            with pytest.raises(MemoryError):
                dist.broadcast(np.ones(50_000), group_src=0, group=pg)

    with monkeypatch.context() as patch:
        patch.setattr(TCPBackend, "broadcast", none)
        tcp(refused)

    def used(pg: ProcessGroup) -> int:
        x = np.full(50_000, pg.rank() + 1.0)
        dist.broadcast(x, group_src=0, group=pg)
        assert x[-1] == 1
        dist.all_reduce(x, group=pg)
        assert x[0] == SIZE
        return pg.status.collective_seq

    assert len(set(tcp(used))) == 1
