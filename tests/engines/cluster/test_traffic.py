"""Status costs what there is to tell, not what was done: messages and memory.

``RANKSCOPE_TRAFFIC_OPS`` sets how many all_reduces (20,000).
"""

from __future__ import annotations

import os
import tracemalloc
from collections import Counter

import psutil
import pytest

from rankscope.engines import Cluster, Execution
from rankscope.engines.agent.publisher import MIN_INTERVAL
from rankscope.engines.status import Summary
from tests.engines.cluster.faults import SUM, WAIT

OPS = int(os.environ.get("RANKSCOPE_TRAFFIC_OPS", "20000"))

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120 + OPS // 100),
]

#: Bytes that an engine may have more than before, and the notebook: neither
#: keeps anything of an op but its slot in the ring, which is full by then.
MORE_IN_ENGINE, MORE_IN_NOTEBOOK = 16 << 20, 2 << 20


def run(cluster: Cluster, ops: int) -> Execution:
    code = (
        f"x = np.ones(4)\nfor _ in range({ops}):\n    dist.all_reduce(x)\n    x[:] = 1"
    )
    return cluster.execute(code).result(60 + OPS / 100)


def memory(cluster: Cluster) -> dict[int, int]:
    cluster.execute("import gc\ngc.collect()").result(WAIT)
    return {
        rank: psutil.Process(pid).memory_info().rss
        for rank, pid in cluster.pids.items()
    }


@pytest.mark.soak
def test_many_small_ops(cluster: Cluster) -> None:
    cluster.execute(SUM).result(WAIT)
    # Fills the rings.
    run(cluster, 3000)
    received: Counter[int] = Counter()
    sizes: list[int] = []

    def receive(rank: int, summary: Summary) -> None:
        received[rank] += 1
        sizes.append(len(repr(summary)))

    engines = memory(cluster)
    cancel = cluster.subscribe(receive)
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        cell = run(cluster, OPS)
        grown = sum(
            one.size_diff
            for one in tracemalloc.take_snapshot().compare_to(before, "filename")
        )
    finally:
        tracemalloc.stop()
        cancel()
    took = max(cell.durations.values())
    print(
        f"{OPS} ops in {took:.1f} s: {sum(received.values())} messages, {grown} bytes"
    )
    for rank in cluster.ranks:
        issued = cluster.status(fresh=True).ranks[rank].groups[0].issued
        assert issued is not None
        assert issued > OPS
        # By the clock, never by the op.
        assert 0 < received[rank] <= took / MIN_INTERVAL + 3
    # A summary is as long for the last op as for the first, but for its digits.
    assert max(sizes) < min(sizes) + 500
    assert grown < MORE_IN_NOTEBOOK
    for rank, used in memory(cluster).items():
        assert used < engines[rank] + MORE_IN_ENGINE
