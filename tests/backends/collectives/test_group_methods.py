"""The methods of a group, by which libraries call torch's ProcessGroup."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.groups.world import world
from tests.backends import gpu_ranks
from tests.backends.gpu_simulation import Simulation
from tests.backends.manual import Manual

MAX = dist.ReduceOp.MAX
Make = Callable[..., Any]


def every_method(pg: dist.ProcessGroup, make: Make) -> None:
    """Call each method in each of its forms on a group of two; check the results."""
    me, other = pg.rank(), 1 - pg.rank()

    def one(value: float, count: int = 2) -> Any:
        return make([float(value)] * count)

    def check(array: Any, *values: float) -> None:
        assert np.asarray(array).tolist() == list(values)

    def done(work: dist.Work) -> None:
        assert isinstance(work, dist.Work)
        work.wait()
        work.synchronize()

    for given in (([one(me)],), (one(me),)):
        (x,) = given
        done(pg.allreduce(x))
        check(x[0] if isinstance(x, list) else x, 1, 1)
    arguments: tuple[Any, ...]
    for arguments in ((dist.AllreduceOptions(reduceOp=MAX),), (MAX,), (MAX, 20)):
        x = one(me)
        done(pg.allreduce([x], *arguments))
        check(x, 1, 1)
    x = one(me + 1)
    done(pg.allreduce([x], opts=dist.AllreduceOptions(timeout=timedelta(seconds=20))))
    check(x, 3, 3)
    many = [one(me), one(me, 3)]
    done(pg.allreduce_coalesced(many))
    check(many[1], 1, 1, 1)

    for arguments in ((1,), (dist.BroadcastOptions(rootRank=1),)):
        x = one(me)
        done(pg.broadcast(x, *arguments))
        check(x, 1, 1)
    for arguments in ((1, MAX), (dist.ReduceOptions(rootRank=1, reduceOp=MAX),)):
        x = one(7 - me)
        done(pg.reduce([x], *arguments))
        check(x, 7, 7)

    parts = [one(9), one(9)]
    done(pg.allgather([parts], [one(me)]))
    check(parts[1], 1, 1)
    done(pg.allgather(parts, one(me + 1), timedelta(seconds=20)))
    check(parts[1], 2, 2)
    # As in c10d a list for each rank, not for each input: here two for three.
    lists = [[one(9), one(9, 1), one(9, 3)] for _ in range(2)]
    done(pg.allgather_coalesced(lists, [one(me), one(me + 5, 1), one(me, 3)]))
    check(lists[1][0], 1, 1)
    check(lists[0][1], 5)
    for gather in (pg._allgather_base, pg.all_gather_single):
        whole = one(9, 4)
        done(gather(whole, one(me)))
        check(whole, 0, 0, 1, 1)
    wholes = [one(9, 4), one(9)]
    done(pg.allgather_into_tensor_coalesced(wholes, [one(me), one(me, 1)]))
    check(wholes[1], 0, 1)

    parts = [one(9), one(9)]
    done(pg.gather([parts] if me else [], [one(me)], dist.GatherOptions(rootRank=1)))
    done(pg.gather(parts if me else [], one(me + 1), 1))
    check(parts[0], *((1, 1) if me else (9, 9)))
    x = one(9)
    sources = [one(3), one(4)]
    done(pg.scatter([x], [sources] if me else [], dist.ScatterOptions(rootRank=1)))
    check(x, 3 + me, 3 + me)
    done(pg.scatter(x, [] if me else sources[::-1], 0))
    check(x, 4 - me, 4 - me)

    x = one(9)
    done(pg.reduce_scatter([x], [[one(me), one(me + 1)]]))
    check(x, *([1, 1], [3, 3])[me])
    done(pg.reduce_scatter(x, [one(me), one(me + 1)], MAX))
    check(x, *([1, 1], [2, 2])[me])
    for scatter in (pg._reduce_scatter_base, pg.reduce_scatter_single):
        done(scatter(x, one(me, 4), dist.ReduceScatterOptions(reduceOp=MAX)))
        check(x, 1, 1)
    done(pg.reduce_scatter_tensor_coalesced([x], [one(me + 1, 4)]))
    check(x, 3, 3)

    received = [one(9), one(9)]
    done(pg.alltoall(received, [one(me), one(me + 5)]))
    check(received[other], other + 5 * me, other + 5 * me)
    for exchange in (pg.alltoall_base, pg.all_to_all_single):
        x = one(9)
        done(exchange(x, make([me, me + 5.0]), [], []))
        check(x, *([0, 1], [5, 6])[me])

    if me:
        done(pg.send([one(7)], 0, 0))
    else:
        x = one(9)
        work = pg.recv([x], 1, 0)
        done(work)
        assert work.source_rank() == 1
        check(x, 7, 7)
    done(pg.barrier())
    done(pg.barrier(dist.BarrierOptions(timeout=20)))
    pg.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


def on_tcp(me: Rank) -> None:
    with me.store() as store:
        dist.init_process_group("tcp", store=store, rank=me.rank, world_size=me.size)
        pg = world.get_group()
        every_method(pg, np.array)
        if me.rank:
            pg.send(np.ones(1), 0, 5).wait()
        else:
            work = pg.recv_anysource([np.zeros(1)], 5)
            work.wait()
            assert work.source_rank() == 1
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.processes
def test_every_method_over_tcp() -> None:
    run_ranks(2, on_tcp)


def test_every_method_over_nccl(simulation: Simulation, tmp_path: Path) -> None:
    ranks = gpu_ranks.Ranks(simulation, tmp_path).start(2)
    try:
        ranks(lambda r: every_method(r.pg, lambda values: r.array(values, "float32")))
    finally:
        ranks.close()


def test_a_methods_timeout_is_that_of_its_op(group: dist.ProcessGroup) -> None:
    x = np.ones(2)
    works = [
        group.allreduce([x], timeout=timedelta(seconds=5)),
        group.allreduce([x], dist.AllreduceOptions(timeout=7)),
        group.allreduce([x]),
    ]
    group.set_timeout(timedelta(seconds=11))
    works.append(group.allreduce([x]))
    assert [work.record.timeout for work in works] == [5, 7, 1800, 11]
    assert group.timeout == 11


def test_bad_arguments_of_methods_are_refused(group: dist.ProcessGroup) -> None:
    x = np.ones(2)
    with pytest.raises(ValueError, match=r"allreduce: the list has 2 arrays"):
        group.allreduce([x, x])
    with pytest.raises(ValueError, match=r"group_src=4; expected a rank in the group"):
        group.broadcast([x], 4)
    with pytest.raises(ValueError, match=r"input_tensors has 1 entries, output_.* 2"):
        group.allgather_into_tensor_coalesced([x, x], [x])
    with pytest.raises(TypeError, match=r"all_reduce in group 'default' on rank 0: op"):
        group.allreduce([x], "sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"set_timeout on group 'default' on rank 0"):
        group.set_timeout(0)
    assert group.status.collective_seq == 0
    assert Manual.made == []


def test_abort_needs_no_reason(group: dist.ProcessGroup) -> None:
    work = group.allreduce([np.ones(2)])
    group.abort()
    with pytest.raises(dist.DistAbortedError, match=r"ProcessGroup\.abort\(\)"):
        work.wait()
    assert group.get_group_store() is group.store
