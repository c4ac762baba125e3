"""Programs as people write them for torch: messages, futures, batches, reductions.

Each runs on every backend; those that need tags or a receive from any rank, which NCCL
does not have, on host memory alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.mpi_ranks import mpiexec, run_mpi_ranks
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.groups.world import world
from rankscope.backends.work.future import Future
from rankscope.futures import collect_all, wait_all
from tests.backends import gpu_ranks
from tests.backends.gpu_simulation import Simulation

SIZE = 3
Make = Callable[..., Any]


def done(work: dist.Work | None) -> None:
    """Wait, on the host too."""
    assert work is not None
    work.wait()
    work.synchronize()


def values(array: Any) -> list[float]:
    found: list[float] = np.asarray(array).reshape(-1).tolist()
    return found


# -- on every backend ------------------------------------------------------------


def ring_of_batches(pg: dist.ProcessGroup, make: Make) -> None:
    """A sum over the ring: what came is added and sent on."""
    me, size = pg.rank(), pg.size()
    passing, total = make([me + 1.0, 10.0 * me]), np.array([me + 1.0, 10.0 * me])
    for _ in range(size - 1):
        came = make([0.0, 0.0])
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, passing, (me + 1) % size, pg),
                dist.P2POp(dist.irecv, came, (me - 1) % size, pg),
            ]
        )
        assert len(works) == 2
        for work in works:
            done(work)
        assert works[1].source_rank() == (me - 1) % size
        total += np.asarray(came)
        passing = came
    assert total.tolist() == [6.0, 30.0]


def several_messages_of_a_pair(pg: dist.ProcessGroup, make: Make) -> None:
    """Messages of one pair arrive in the order of the batch's list."""
    if pg.rank() > 1:
        return
    other = 1 - pg.rank()
    sent = [make([float(10 * pg.rank() + i)] * (i + 1)) for i in range(3)]
    came = [make([0.0] * (i + 1)) for i in range(3)]
    ops = [dist.P2POp(dist.irecv, one, other, pg) for one in came]
    ops += [dist.P2POp(dist.isend, one, other, pg) for one in sent]
    for work in dist.batch_isend_irecv(ops):
        done(work)
    for i, one in enumerate(came):
        assert values(one) == [10 * other + i] * (i + 1)


def pipeline(pg: dist.ProcessGroup, make: Make) -> None:
    """Stages that compute on micro-batches and pass them on."""
    me, last = pg.rank(), pg.size() - 1
    for batch in range(3):
        x = make([float(batch)])
        if me > 0:
            done(dist.irecv(x, me - 1, pg))
        x = make([values(x)[0] * 2 + me])
        if me < last:
            done(dist.isend(x, me + 1, pg))
        else:
            assert values(x) == [8.0 * batch + 4]


def averaged_gradients(pg: dist.ProcessGroup, make: Make) -> None:
    """A communication hook: reduce each bucket, divide in a callback."""

    def hook(bucket: Any) -> Future:
        work = dist.all_reduce(bucket, group=pg, async_op=True)
        assert work is not None
        return work.get_future().then(
            lambda reduced: np.asarray(reduced.value()[0]) / pg.size()
        )

    futures = [hook(make([float(pg.rank()), float(i)])) for i in range(4)]
    for i, future in enumerate(futures):
        assert future.wait(60).tolist() == [1.0, float(i)]


def a_chain_of_callbacks(pg: dist.ProcessGroup, make: Make) -> None:
    """A callback may issue an op and wait for it; the next sees what it returned."""
    x = make([float(pg.rank() + 1)])
    first = dist.all_reduce(x, group=pg, async_op=True)
    assert first is not None

    def maximum(reduced: Future) -> Any:
        (total,) = reduced.value()
        y = make([values(total)[0] + pg.rank()])
        done(dist.all_reduce(y, dist.ReduceOp.MAX, pg, async_op=True))
        return values(y)[0]

    doubled = first.get_future().then(maximum).then(lambda one: 2 * one.value())
    assert doubled.wait(60) == 16.0


def many_futures(pg: dist.ProcessGroup, make: Make) -> None:
    arrays = [make([float(i)] * (i + 1)) for i in range(5)]
    works = [dist.all_reduce(one, group=pg, async_op=True) for one in arrays]
    futures = [work.get_future() for work in works if work is not None]
    assert len(collect_all(futures).wait(60)) == 5
    for i, value in enumerate(wait_all(futures, 60)):
        assert values(value[0]) == [3.0 * i] * (i + 1)


def awaited_works(pg: dist.ProcessGroup, make: Make) -> None:
    async def main() -> list[Any]:
        arrays = [make([float(pg.rank())]), make([2.0])]
        works = [dist.all_reduce(one, group=pg, async_op=True) for one in arrays]
        return [await work for work in works if work is not None]

    ((first,), (second,)) = asyncio.run(main())
    assert (values(first), values(second)) == ([3.0], [6.0])


def an_asynchronous_batch(pg: dist.ProcessGroup, make: Make) -> None:
    me, size = pg.rank(), pg.size()
    many = [make([float(me + i)] * 3) for i in range(4)]
    whole, part = make([0.0] * size), make([0.0])
    with dist.coalescing_manager(pg, async_ops=True) as manager:
        for one in many:
            dist.all_reduce(one, group=pg, async_op=True)
        dist.all_gather_into_tensor(whole, make([float(me)]), group=pg, async_op=True)
        dist.reduce_scatter_tensor(part, make([1.0] * size), group=pg, async_op=True)
    assert len(manager.works) == 3
    manager.wait()
    manager.work.synchronize()
    assert [values(one)[0] for one in many] == [3.0 + 3 * i for i in range(4)]
    assert values(whole) == [0.0, 1.0, 2.0]
    assert values(part) == [3.0]


def each_dtype(pg: dist.ProcessGroup, make: Make) -> None:
    names = ["int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bool"]
    if pg.name() != "nccl":
        names += ["int16", "uint16", "uint32", "uint64", "complex64", "complex128"]
    for name in names:
        held = [np.array([r, 1, 2]).astype(name) for r in range(pg.size())]
        x = make(held[pg.rank()], name)
        done(dist.all_reduce(x, group=pg, async_op=True))
        wanted = np.add.reduce(held, dtype=name)
        np.testing.assert_array_equal(np.asarray(x), wanted, name)
        if name.startswith("complex"):
            continue
        for op, fold in ((dist.ReduceOp.MIN, np.minimum), (dist.ReduceOp.MAX, max_)):
            x = make(held[pg.rank()], name)
            done(dist.all_reduce(x, op, pg, async_op=True))
            np.testing.assert_array_equal(np.asarray(x), fold.reduce(held), name)


max_ = np.maximum

EVERYWHERE = (
    ring_of_batches,
    several_messages_of_a_pair,
    pipeline,
    averaged_gradients,
    a_chain_of_callbacks,
    many_futures,
    awaited_works,
    an_asynchronous_batch,
    each_dtype,
)


# -- on host memory --------------------------------------------------------------


def ring_of_messages(pg: dist.ProcessGroup, make: Make) -> None:
    """Each sends to the right before it receives from the left."""
    me, size = pg.rank(), pg.size()
    sent, came = make([float(me)]), make([-1.0])
    request = dist.isend(sent, (me + 1) % size, pg)
    assert dist.recv(came, (me - 1) % size, pg) == (me - 1) % size
    request.wait()
    assert values(came) == [(me - 1) % size]


def ping_pong_by_tags(pg: dist.ProcessGroup, make: Make) -> None:
    """Tags match messages that are received in another order than they were sent."""
    if pg.rank() == 0:
        requests = [dist.isend(make([float(tag)]), 1, pg, tag) for tag in (1, 2, 3)]
        for request in requests:
            request.wait()
    elif pg.rank() == 1:
        for tag in (3, 1, 2):
            x = make([0.0])
            dist.recv(x, 0, pg, tag)
            assert values(x) == [tag]


def from_whoever_sends(pg: dist.ProcessGroup, make: Make) -> None:
    if pg.rank():
        dist.send(make([float(pg.rank())]), 0, pg, tag=9)
        return
    senders = []
    for _ in range(pg.size() - 1):
        x = make([0.0])
        senders.append(dist.recv(x, None, pg, tag=9))
        assert values(x) == [senders[-1]]
    assert sorted(senders) == [1, 2]


def flags(pg: dist.ProcessGroup, make: Make) -> None:
    """Sets of ranks as bits, and flags as bool."""
    bits = make([1 << pg.rank()], "int64")
    dist.all_reduce(bits, dist.ReduceOp.BOR, pg)
    assert bits.tolist() == [0b111]
    dist.all_reduce(bits, dist.ReduceOp.BXOR, pg)
    assert bits.tolist() == [0b111]
    bits = make([0b110 | 1 << pg.rank()], "uint16")
    dist.all_reduce(bits, dist.ReduceOp.BAND, pg)
    assert bits.tolist() == [0b110]
    late = make([pg.rank() == 2, False], "bool")
    dist.all_reduce(late, group=pg)
    assert late.tolist() == [True, False]


ON_HOST = (*EVERYWHERE, ring_of_messages, ping_pong_by_tags, from_whoever_sends, flags)


def run_all(me: Rank, backend: str) -> list[str]:
    with me.store() as store:
        where: dict[str, Any] = {}
        if backend != "mpi":
            where = {"store": store, "rank": me.rank, "world_size": me.size}
        dist.init_process_group(f"cpu:{backend}", timeout=60, **where)
        names = []
        for program in ON_HOST:
            program(world.get_group(), np.array)
            names.append(program.__name__)
        dist.barrier()
        dist.destroy_process_group()
        return names


@pytest.mark.processes
def test_programs_over_tcp() -> None:
    for names in run_ranks(SIZE, run_all, "tcp"):
        assert len(names) == len(ON_HOST)


@pytest.mark.processes
@pytest.mark.skipif(dist.unavailable_reason("ucx") is not None, reason="needs UCX")
def test_programs_over_ucx() -> None:
    for names in run_ranks(SIZE, run_all, "ucx"):
        assert len(names) == len(ON_HOST)


@pytest.mark.processes
@pytest.mark.mpi
@pytest.mark.skipif(
    not dist.is_mpi_available() or mpiexec() is None,
    reason="mpi4py or mpiexec is missing: pip install -e .[dev,mpi]",
)
def test_programs_over_mpi() -> None:
    for names in run_mpi_ranks(SIZE, run_all, "mpi"):
        assert len(names) == len(ON_HOST)


@pytest.mark.parametrize("program", EVERYWHERE, ids=lambda one: one.__name__)
def test_programs_over_nccl(
    simulation: Simulation, tmp_path: Path, program: Callable[..., None]
) -> None:
    ranks = gpu_ranks.Ranks(simulation, tmp_path).start(SIZE)
    try:
        ranks(lambda r: program(r.pg, lambda v, dtype="float32": r.array(v, dtype)))
    finally:
        ranks.close()
