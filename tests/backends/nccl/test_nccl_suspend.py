"""suspend() and resume() of a group, over the simulation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.backends.groups.spec import Origin
from tests.backends.gpu_ranks import Rank, Ranks
from tests.backends.gpu_simulation import Simulation

HELD = {"suspend": 12, "persist": 4, "total": 16}


@pytest.fixture
def ranks(simulation: Simulation, tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(simulation, tmp_path)
    yield made
    made.close()


def total(r: Rank, pg: ProcessGroup | None = None) -> float:
    x = r.array([r.rank + 1.0])
    dist.all_reduce(x, group=pg or r.pg)
    r.synchronize()
    return float(x[0])


def state(r: Rank) -> str:
    return str(r.pg.summary().devices["cuda"])


def test_a_suspended_group_holds_less_memory_and_is_resumed(ranks: Ranks) -> None:
    ranks.start(3)

    def body(r: Rank) -> None:
        for _ in range(2):
            assert total(r) == 6.0
            assert r.pg.memory_stats() == {**HELD, "suspended": 0}
            r.pg.suspend()
            assert r.pg.memory_stats() == {**HELD, "suspended": 1}
            assert state(r) == f"nccl (device {r.rank}: suspended)"
            r.pg.resume()
            assert state(r) == f"nccl (device {r.rank}: running)"
        assert total(r) == 6.0

    ranks(body)


def test_an_op_of_a_suspended_group_is_refused_before_it_has_a_number(
    ranks: Ranks,
) -> None:
    ranks.start(2)

    def body(r: Rank) -> None:
        total(r)
        r.pg.suspend()
        refused = r"all_reduce in group 'g' on rank \d: the group is suspended.*resume"
        with pytest.raises(dist.DistBackendError, match=refused) as caught:
            r.all_reduce()
        assert (caught.value.rank, caught.value.op) == (r.rank, "all_reduce")
        with (
            pytest.raises(dist.DistBackendError, match=refused),
            dist.coalescing_manager(r.pg),
        ):
            r.all_reduce()
        with pytest.raises(dist.DistBackendError, match="barrier in group 'g'"):
            dist.barrier(group=r.pg)
        assert r.pg.status.collective_seq == 1
        assert not r.pg.status.in_flight
        r.pg.resume()
        total(r)
        assert r.pg.status.collective_seq == 2

    ranks(body)


def test_suspend_waits_for_the_ops_in_flight(
    ranks: Ranks, simulation: Simulation
) -> None:
    ranks.start(2)
    ranks(total)
    go = threading.Event()

    def body(r: Rank) -> None:
        if r.rank == 0:
            simulation.compute(0, lambda: (go.wait(30), None)[1])
        work = r.all_reduce()
        if r.rank == 1:
            until(lambda: bool(work.started_ns))
            go.set()
        r.pg.suspend()
        assert work.is_completed()
        r.pg.resume()

    ranks(body)


def test_a_rank_that_does_not_suspend_is_named(ranks: Ranks) -> None:
    ranks.start(3, timeout=1)
    ranks(total)

    def body(r: Rank) -> None:
        if r.rank == 1:
            until(lambda: r.pg.aborted is not None)
        else:
            late = "rank 1 of the group did not call suspend|the group was aborted"
            with pytest.raises(dist.DistBackendError, match=late) as caught:
                r.pg.suspend()
            assert caught.value.culprits == (1,)
        assert "rank 1 of the group did not call suspend" in str(r.pg.aborted)
        # NCCL was not called: in it, nothing but an abort would end the wait.
        assert ("suspend", r.rank) not in ranks.simulation.calls

    ranks(body)
    for r in ranks.ranks:
        r.pg.rebuild()
    assert ranks(total) == [6.0] * 3


@pytest.mark.parametrize("call", ["suspend", "resume"])
def test_an_error_of_nccl_aborts_the_group(
    ranks: Ranks, simulation: Simulation, call: str
) -> None:
    ranks.start(2)
    ranks(total)
    if call == "resume":
        ranks(lambda r: r.pg.suspend())
    library = getattr(simulation.nccl, call)

    def fails(comm: object) -> None:
        library(comm)
        simulation.fails[0] = "no memory left"

    setattr(simulation.nccl, call, fails)

    def body(r: Rank) -> None:
        if r.rank == 0:
            with pytest.raises(dist.DistBackendError, match="no memory left"):
                getattr(r.pg, call)()
        else:
            # It may be over here before rank 0 knows of the error.
            with contextlib.suppress(dist.DistAbortedError):
                getattr(r.pg, call)()
        until(lambda: "no memory left" in str(r.pg.aborted))

    ranks(body)
    simulation.fails.clear()
    setattr(simulation.nccl, call, library)
    for r in ranks.ranks:
        r.pg.rebuild()
    assert ranks(total) == [3.0] * 2


def test_an_abort_ends_a_suspension(ranks: Ranks) -> None:
    ranks.start(2)
    ranks(total)
    ranks(lambda r: r.pg.suspend())
    ranks.ranks[0].pg.abort("enough")
    until(lambda: all(r.pg.aborted for r in ranks.ranks))

    def body(r: Rank) -> None:
        with pytest.raises(dist.DistAbortedError, match="enough"):
            r.pg.resume()
        r.pg.rebuild()

    ranks(body)
    assert ranks(total) == [3.0] * 2


def test_a_communicator_is_not_split_off_a_suspended_one(ranks: Ranks) -> None:
    ranks.start(2)
    ranks(total)
    ranks(lambda r: r.pg.suspend())
    config = BackendConfig("cuda:nccl")

    def body(r: Rank) -> float:
        store, origin = ranks.stores[r.rank], Origin(r.pg.built_backend)
        made = ProcessGroup("h", [0, 1], r.rank, config, store, 30, origin=origin)
        try:
            return total(r, made)
        finally:
            made.shutdown()

    assert ranks(body) == [3.0] * 2
    assert [name for name, _ in ranks.simulation.calls].count("init") == 4


def test_calls_that_do_not_fit(ranks: Ranks) -> None:
    ranks.start(2)

    def body(r: Rank) -> None:
        with pytest.raises(NotImplementedError, match="no op has used cuda:nccl yet"):
            r.pg.suspend()
        total(r)
        with pytest.raises(dist.DistBackendError, match="is not suspended"):
            r.pg.resume()
        r.pg.suspend()
        with pytest.raises(dist.DistBackendError, match="is suspended already"):
            r.pg.suspend()

    ranks(body)


def test_what_is_lacking_is_said(
    ranks: Ranks, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.start(1)
    (r,) = ranks.ranks
    ranks(total)
    simulation.nccl.suspend_lacks = lambda: "an old NCCL"  # type: ignore[method-assign]
    for call in (r.pg.suspend, r.pg.memory_stats):
        with pytest.raises(NotImplementedError, match="group 'g' on rank 0: an old NC"):
            call()
    monkeypatch.setenv("RANKSCOPE_NCCL_USE_COMM_NONBLOCKING", "0")
    with pytest.raises(NotImplementedError, match="COMM_NONBLOCKING=1 avoids this"):
        r.pg.suspend()
    # Nothing has changed.
    assert ranks(total) == [1.0]


def test_host_ops_of_a_suspended_group_go_on(
    simulation: Simulation, tmp_path: Path
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    config = BackendConfig("cpu:gloo,cuda:nccl")
    pg = ProcessGroup("g", [0], 0, config, store, 30)
    host = np.ones(1)
    dist.all_reduce(host, group=pg)
    with pytest.raises(NotImplementedError, match="'gloo' does not implement suspend"):
        pg.suspend()
    dist.all_reduce(simulation.array([1.0], 0), group=pg)
    pg.suspend()
    dist.all_reduce(host, group=pg)
    with pytest.raises(dist.DistBackendError, match="is suspended"):
        dist.all_reduce(simulation.array([1.0], 0), group=pg)
    pg.resume()
    dist.all_reduce(simulation.array([1.0], 0), group=pg)
    pg.shutdown()
    store.close()
