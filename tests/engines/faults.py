"""What tests of faults share: hangs on purpose, side processes, usage, recovery."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from rankscope.engines import Cluster, Execution
from tests.waiting import until

__all__ = ["HANG", "SUM", "WAIT", "all_in_flight", "hanging", "lives", "sides"]

#: Seconds after which a step that should take a moment has failed.
WAIT = 30

#: Every rank but one is in an all_reduce for ever.
HANG = """
import threading
x = np.ones(1000, np.float32)
if rank == {absent}:
    threading.Event().wait()
dist.all_reduce(x)
"""

#: Passes if the default group of four ranks works.
SUM = "y = np.full(100, rank + 1.0)\ndist.all_reduce(y)\nassert (y == 10).all()"


def hanging(cluster: Cluster, absent: int, cell: int = 50) -> Execution:
    """Start a collective that one rank does not join; wait till the others are in."""
    running = cluster.execute(HANG.format(absent=absent), cell=cell)
    others = [rank for rank in cluster.ranks if rank != absent]
    until(lambda: all_in_flight(cluster, others), WAIT, "the collective to start")
    return running


def all_in_flight(cluster: Cluster, ranks: Sequence[int]) -> bool:
    """Whether each of `ranks` has an op in flight on the default group."""
    known = cluster.status().ranks
    return all(known[rank].groups and known[rank].groups[0].in_flight for rank in ranks)


def lives(process: psutil.Process) -> bool:
    """Whether `process` is there and no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def sides(pid: int) -> list[psutil.Process]:
    """The living gloo side processes of the engine `pid`, spares included."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "gloo_side" in " ".join(child.cmdline()) and lives(child):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found
