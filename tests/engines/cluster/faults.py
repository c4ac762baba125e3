"""What tests of faults share: hangs on purpose, side processes, usage, recovery."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, Execution
from tests.environment import environment

__all__ = [
    "HANG",
    "HANG_LINE",
    "SUM",
    "WAIT",
    "all_in_flight",
    "hanging",
    "left_hanging",
    "lives",
    "sides",
    "stop",
    "until_at",
]

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

#: The line where the absent rank is, counted as a traceback counts.
HANG_LINE = 4

#: Passes if the default group of four ranks works.
SUM = "y = np.full(100, rank + 1.0)\ndist.all_reduce(y)\nassert (y == 10).all()"

#: A notebook that starts a cluster to keep, leaves a hang behind, and is killed.
_NOTEBOOK = """
import json, os, signal, sys
from rankscope.engines import Cluster
from tests.engines.cluster.faults import all_in_flight
from rankscope.backends.conformance.waiting import until
cluster = Cluster.start(4, keep=True, cluster_id=sys.argv[1], timeout=600)
cluster.execute(
    "mine = rank * 100\\npair = dist.new_group([1, 3], group_desc='pair')"
).result(30)
cluster.execute(sys.argv[2], cell=7)
processes = [p.pid for p in cluster._launched.processes()]
until(lambda: all_in_flight(cluster, [0, 1, 3]), 30)
print(json.dumps(processes), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def hanging(cluster: Cluster, absent: int, cell: int = 50) -> Execution:
    """Start a collective that one rank does not join; wait until it hangs."""
    running = cluster.execute(HANG.format(absent=absent), cell=cell)
    others = [rank for rank in cluster.ranks if rank != absent]
    until(lambda: all_in_flight(cluster, others), WAIT, "the collective to start")
    # The absent rank may be the last to begin its cell.
    until_at(cluster, [absent], cell, HANG_LINE)
    return running


def all_in_flight(cluster: Cluster, ranks: Sequence[int]) -> bool:
    """Whether each of `ranks` has an op in flight on the default group."""
    # Freshly: what was published last may be of the op before.
    known = cluster.status(fresh=True).ranks
    return all(known[rank].groups and known[rank].groups[0].in_flight for rank in ranks)


def until_at(cluster: Cluster, ranks: Sequence[int], cell: int, line: int) -> None:
    """Wait until the main threads of `ranks` are at a line of a cell."""
    place = f"Cell In[{cell}], line {line},"
    until(
        lambda: all(place in stack for stack in cluster.where(ranks).values()),
        WAIT,
        f"ranks {list(ranks)} to be at cell {cell} line {line}",
    )


def left_hanging(cluster_id: str) -> list[psutil.Process]:
    """Have a notebook leave four ranks behind in a hang of rank 2; its processes."""
    notebook = subprocess.Popen(
        [sys.executable, "-c", _NOTEBOOK, cluster_id, HANG.format(absent=2)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert notebook.stdout is not None
    with notebook.stdout:
        pids: list[int] = json.loads(notebook.stdout.readline())
        processes = [psutil.Process(pid) for pid in pids]
    assert notebook.wait(WAIT) == -signal.SIGKILL
    return processes


def stop(pid: int) -> None:
    """Stop a process, and wait until none of its threads runs on."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path("/proc", str(pid), "task")

    def states() -> set[str]:
        # After the name, which is in parentheses.
        stats = [(task / "stat").read_text() for task in tasks.iterdir()]
        return {stat.rpartition(")")[2].split()[0] for stat in stats}

    until(lambda: states() == {"T"}, WAIT, "every thread to stop")


def sides(pid: int) -> list[psutil.Process]:
    """The living processes of the engine `pid`: those of gloo, spares included."""
    return [one for one in psutil.Process(pid).children(recursive=True) if lives(one)]
