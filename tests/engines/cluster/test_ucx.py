"""Ranks whose groups are over UCX: what the status tells of their connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope.backends import unavailable_reason
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, GroupStatus
from rankscope.widgets import StatusTable

WAIT = 60

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(unavailable_reason("ucx") is not None, reason="needs UCX"),
]

SHM = "shm,cma"


@pytest.fixture(scope="module")
def cluster(_module_leaves_nothing: None) -> Iterator[Cluster]:
    with Cluster.start(3, backend="cpu:ucx") as started:
        yield started


def groups(cluster: Cluster, name: str = "default") -> list[GroupStatus]:
    """What each rank says of a group that it is in."""
    found = [rank.group(name) for rank in cluster.status(fresh=True).ranks]
    return [one for one in found if one is not None]


def connect(cluster: Cluster) -> None:
    """Have each rank send to each other one."""
    cluster.execute(
        "parts = [np.zeros(1) for _ in range(world_size)]\n"
        "dist.all_to_all(parts, [np.full(1, rank * 1.0) for _ in range(world_size)])\n"
        "assert [part.item() for part in parts] == [0, 1, 2]"
    ).result(WAIT)


def test_nothing_is_connected_before_the_first_op(cluster: Cluster) -> None:
    assert all(one.transports == {} for one in groups(cluster))
    said = str(StatusTable(cluster.status(fresh=True)))
    assert "connects at the first op" in said


def test_the_transports_of_every_pair(cluster: Cluster) -> None:
    connect(cluster)
    found = {one: group.transports for one, group in enumerate(groups(cluster))}
    assert found == {0: {SHM: (1, 2)}, 1: {SHM: (0, 2)}, 2: {SHM: (0, 1)}}
    said = str(StatusTable(cluster.status(fresh=True)))
    assert "shm+cma between all ranks" in said


def test_a_part_of_the_ranks_is_told_by_global_rank(cluster: Cluster) -> None:
    cluster.execute(
        "part = dist.new_group([1, 2], group_desc='part')\n"
        "if rank: dist.all_reduce(np.ones(1), group=part)"
    ).result(WAIT)
    first, second = groups(cluster, "part")
    assert (first.transports, second.transports) == ({SHM: (2,)}, {SHM: (1,)})


def test_after_an_abort_none_until_the_group_is_used_again(cluster: Cluster) -> None:
    cluster.abort(reason="a test")
    until(
        lambda: all(one.transports == {} for one in groups(cluster)),
        WAIT,
        "the connections to end",
    )
    cluster.rebuild()
    connect(cluster)
    assert all(len(one.transports[SHM]) == 2 for one in groups(cluster))
