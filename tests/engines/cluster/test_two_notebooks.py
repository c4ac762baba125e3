"""Two notebooks use the same ranks, and one of them restarts some."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
from tests.engines.cluster.faults import SUM, WAIT

pytestmark = pytest.mark.processes


@pytest.fixture
def owner() -> Iterator[Cluster]:
    with Cluster.start(4) as started:
        yield started


@pytest.fixture
def guest(owner: Cluster) -> Iterator[Cluster]:
    with Cluster.attach(cluster_id=owner.cluster_id, attach_timeout=WAIT) as attached:
        yield attached


@pytest.mark.parametrize("ranks", [[1], [0], [0, 1, 2, 3]])
def test_ranks_that_the_other_restarts_are_taken_over(
    owner: Cluster, guest: Cluster, ranks: list[int]
) -> None:
    owner.execute("mine = rank * 100\n" + SUM).result(WAIT)
    guest.restart(ranks)
    until(lambda: not owner.status().dead, WAIT, "the owner to take them over")
    assert owner.pids == guest.pids
    assert owner.engine_ids == guest.engine_ids
    owner.rebuild()
    owner.execute(SUM).result(WAIT)
    kept = [rank for rank in range(4) if rank not in ranks]
    if kept:
        assert owner.pull("mine", kept) == {rank: rank * 100 for rank in kept}
    # The other way round, with the store where the guest made it.
    owner.restart(ranks)
    until(lambda: not guest.status().dead, WAIT, "the guest to take them over")
    assert guest.pids == owner.pids
    guest.rebuild()
    guest.execute(SUM).result(WAIT)
    guest.restart(ranks)
    until(lambda: not owner.status().dead, WAIT, "the owner to take them over again")
    processes = [psutil.Process(pid) for pid in owner.pids.values()]
    guest.close()
    owner.shutdown()
    assert not any(map(lives, processes))


def test_a_cell_runs_on_ranks_that_the_other_has_just_restarted(
    owner: Cluster, guest: Cluster
) -> None:
    pid = owner.pids[1]
    guest.restart([1])
    until(lambda: not lives(pid), WAIT, "the engine to end")
    why = until(lambda: owner.glance().ranks[1].reason, WAIT, "the owner to see it")
    assert why.startswith("rank 1 is dead: ended by ")
    assert why.endswith(" for a restart")
    owner.execute("assert rank == 1", ranks=[1]).result(WAIT)
    assert owner.pids == guest.pids


def test_what_the_other_has_just_restarted_ends_with_the_ranks(
    owner: Cluster, guest: Cluster
) -> None:
    guest.restart([1])
    pid = guest.pids[1]
    owner.shutdown()
    assert not lives(pid)
