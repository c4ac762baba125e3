"""Slow-down of collectives while every rank publishes its status."""

from __future__ import annotations

from rankscope.engines import Cluster

from .table import Row, Sample

__all__ = ["measure"]

#: As many as a small machine has cores: CPU that publishing uses is missing in the ops.
RANKS = 2
BUDGET = 1.02
WAIT = 120.0

# Runs on the ranks: blocks of ops, in turns with the subscriptions to this rank's
# status and without.
SETUP = """
import time
from rankscope.engines.agent import agent
publisher = agent._agent._publisher
subscribed, x = publisher.subscriptions, dist.zeros(16384)

def block(on, ops):
    publisher.subscriptions = subscribed if on else {}
    dist.barrier()
    began = time.perf_counter()
    for _ in range(ops):
        dist.all_reduce(x)
    return (time.perf_counter() - began) / ops

def blocks(rounds, ops):
    times = {True: [], False: []}
    for turn in range(rounds):
        for on in (turn % 2 == 0, turn % 2 == 1):
            times[on].append(block(on, ops))
    publisher.subscriptions = subscribed
    return times
"""


def measure(rounds: int) -> list[Row]:
    """Compare all_reduces of 64 KiB while status is published with those without.

    `rounds` blocks of 1500 ops alternate on the same ranks.
    """
    with Cluster.start(RANKS) as cluster:
        cluster.execute(SETUP).result(WAIT)
        cluster.execute("blocks(2, 500)").result(WAIT)
        cluster.execute(f"times = blocks({rounds}, 1500)").result(WAIT)
        times = cluster.pull("times", ranks=0)[0]
    on, off = (Sample([[one] for one in times[way]]) for way in (True, False))
    what = "status published, against not: all_reduce 64 KiB, 2 ranks"
    return [Row.compare(what, on, off, BUDGET)]
