"""What docs/security.md says of the sockets of torch, on one host."""

from __future__ import annotations

import psutil

from rankscope.engines import Cluster
from tests.test_security import elsewhere, listeners

WAIT = 60


def ports(cluster: Cluster) -> list[set[tuple[str, int]]]:
    """Return where each rank listens."""
    return [listeners(psutil.Process(rank.pid)) for rank in cluster.status().ranks]


def test_the_groups_of_torch_listen_on_loopback() -> None:
    with Cluster.start(2, torch=True) as cluster:
        cluster.execute("dist.all_reduce(torch.ones(3))").result(WAIT)
        found = ports(cluster)
        assert all(found)
        assert [elsewhere(one) for one in found] == [[], []]
