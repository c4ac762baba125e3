"""What docs/security.md says of the sockets of torch, on one host."""

from __future__ import annotations

import psutil

from rankscope.engines import Cluster
from tests.test_security import elsewhere, listeners

WAIT = 60


def ports(cluster: Cluster) -> list[set[tuple[str, int]]]:
    """Return where each rank listens."""
    return [listeners(psutil.Process(rank.pid)) for rank in cluster.status().ranks]


def test_the_groups_of_torch_listen_on_loopback_and_rpc_elsewhere() -> None:
    with Cluster.start(2, torch=True) as cluster:
        cluster.execute("dist.all_reduce(torch.ones(3))").result(WAIT)
        before = ports(cluster)
        assert all(before)
        assert [elsewhere(found) for found in before] == [[], []]
        cluster.execute(
            "import os, torch.distributed.rpc as rpc\n"
            "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)\n"
            "port = int(os.environ['MASTER_PORT'])"
        ).result(WAIT)
        # That of the store, which torch opens at all addresses.
        port = cluster.pull("port", [0])[0]
        assert port in {number for _, number in elsewhere(ports(cluster)[0])}
        cluster.execute("rpc.shutdown()").result(WAIT)
