"""Aborts beside other groups of a device: with ncclCommRevoke, and without.

Over a simulated GPU, as in `test_nccl`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.errors import LibraryFailure
from tests.backends.gpu_ranks import Rank, Ranks
from tests.backends.gpu_simulation import Comm, Simulation

Groups = tuple[Ranks, Ranks]


@pytest.fixture
def groups(simulation: Simulation, tmp_path: Path) -> Iterator[Groups]:
    """Two groups of two ranks on the same devices, both with a communicator."""
    made = Ranks(simulation, tmp_path), Ranks(simulation, tmp_path)
    for ranks, name in zip(made, ("one", "two"), strict=True):
        ranks.start(2, name=name)
        ranks(lambda r: dist.barrier(group=r.pg))
    yield made
    for ranks in made:
        ranks.close()


def on_rank_0(ranks: Ranks) -> dist.Work:
    """Issue an op that waits for rank 1; return it when the device is at it."""

    def issue(r: Rank) -> dist.Work | None:
        return r.all_reduce(3.0) if r.rank == 0 else None

    work = ranks(issue)[0]
    assert work is not None
    until(lambda: work.started_ns > 0)
    return work


def test_a_healthy_group_of_the_device_lives_on(
    simulation: Simulation, groups: Groups
) -> None:
    one, two = groups
    hung, healthy = on_rank_0(one), on_rank_0(two)
    one.ranks[0].pg.abort("it hangs")
    with pytest.raises(dist.DistAbortedError, match="it hangs"):
        hung.synchronize()
    # The kernel had ended by then, and nobody took its end for a success.
    assert hung.state is dist.WorkState.ABORTED
    until(lambda: ("abort", 0) in simulation.calls)
    calls = simulation.calls
    assert calls.index(("revoke", 0)) < calls.index(("abort", 0))
    assert not healthy.is_completed()

    def join(r: Rank) -> None:
        if r.rank == 1:
            r.all_reduce(4.0).synchronize()

    two(join)
    healthy.synchronize()
    assert healthy.result()[0][0] == 7
    assert two.ranks[0].pg.aborted is None


def old(simulation: Simulation) -> None:
    simulation.nccl.can_revoke = False


def refused(simulation: Simulation) -> None:
    def refuse(comm: Comm) -> None:
        raise LibraryFailure("NCCL reports: invalid usage")

    simulation.nccl.revoke = refuse  # type: ignore[method-assign]


def without_effect(simulation: Simulation) -> None:
    def mark(comm: Comm) -> None:
        comm.revoked = True

    simulation.nccl.revoke = mark  # type: ignore[method-assign]


def stuck(simulation: Simulation) -> None:
    simulation.nccl.revoke = (  # type: ignore[method-assign]
        lambda comm: (threading.Event().wait(3), None)[1]
    )


@pytest.mark.parametrize("library", [old, refused, without_effect, stuck])
def test_groups_of_one_device_are_aborted_together_where_revoke_does_not_help(
    simulation: Simulation, groups: Groups, library: Callable[[Simulation], None]
) -> None:
    library(simulation)
    one, two = groups
    first, second = on_rank_0(one), on_rank_0(two)
    one.ranks[0].pg.abort("the first one hangs")
    with pytest.raises(dist.DistAbortedError, match="the first one hangs"):
        first.synchronize()
    with pytest.raises(dist.DistAbortedError, match="beside a communicator"):
        second.synchronize()


def test_a_communicator_with_nothing_in_flight_is_not_revoked(
    simulation: Simulation, groups: Groups
) -> None:
    one, two = groups
    healthy = on_rank_0(two)
    one.ranks[0].pg.abort("enough")
    until(lambda: ("abort", 0) in simulation.calls)
    assert ("revoke", 0) not in simulation.calls
    assert not healthy.is_completed()
    two.ranks[1].pg.abort("enough")
