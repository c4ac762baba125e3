"""torch's RPC on watched ranks: not watched, and not in its way either."""

from __future__ import annotations

import time

import psutil

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
from tests.with_torch.cells import WAIT, run, values

SETUP = """\
import threading
import torch.distributed.rpc as rpc
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
"""


def test_a_call_works_as_in_plain_torch() -> None:
    with Cluster.start(2, torch="gloo") as cluster:
        run(cluster, SETUP)
        call = "rpc.rpc_sync(f'worker{1 - rank}', torch.add, args=(2, rank))"
        assert values(cluster, call) == {0: [2], 1: [3]}
        run(cluster, "rpc.shutdown()\ndist.barrier()")


def test_a_rank_that_waits_is_seen_there_and_ends_with_the_cluster() -> None:
    with Cluster.start(2, torch="gloo") as cluster:
        run(cluster, SETUP + "def block():\n    threading.Event().wait()\n")
        cluster.execute("if rank == 0:\n    rpc.rpc_sync('worker1', block)", cell=3)
        until(lambda: "rpc_sync" in cluster.where([0])[0], WAIT, "rank 0 to wait")
        until(
            lambda: "block" in str(cluster.stacks([1], every=True).stacks[1]),
            WAIT,
            "the function to run",
        )
        assert cluster.diagnose() == []
        processes = [psutil.Process(one.pid) for one in cluster.status().ranks]
        began = time.monotonic()
    assert time.monotonic() - began < WAIT
    assert not any(one.is_running() for one in processes)
