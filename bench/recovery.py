"""Seconds from a hang to its verdict, to its end, and to the next working op.

Four real ranks repeat the steps of a user. The table has the median and, in
parentheses, the worst time.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable

from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.engines import Cluster, Execution, StallWatch

from .table import Row

__all__ = ["measure"]

RANKS, ABSENT, VICTIM = 4, 2, 3
#: Seconds after which an op counts as stalled: what comes after it is measured.
STALL = 1.0
WAIT = 60.0
BUDGETS = {
    "hang → verdict on all ranks, after the stall threshold": 1.0,
    "abort → every rank's cell has ended": 1.0,
    "rebuild → first collective done": 2.0,
    "SIGKILL of a rank → the others' error": 2.0,
}
HANG = f"if rank != {ABSENT}:\n    dist.all_reduce(np.ones(4))"
SUM = "x = np.ones(4)\ndist.all_reduce(x)\nassert x[0] == world_size"
KEEP_GOING = "while True:\n    dist.all_reduce(np.ones(4))"


def measure(trials: int, say: Callable[[str], None]) -> list[Row]:
    """Cause `trials` hangs and as many deaths; return a row for each step.

    `say` is called with the progress.
    """
    took: dict[str, list[float]] = {name: [] for name in BUDGETS}
    hang, abort, rebuild, death = took.values()
    with Cluster.start(RANKS) as cluster:
        cluster.execute(SUM).result(WAIT)
        found: queue.SimpleQueue[list[Verdict]] = queue.SimpleQueue()
        watch = StallWatch(cluster, found.put, STALL)
        try:
            for trial in range(trials):
                say(f"  hang {trial + 1} of {trials}")
                cell = cluster.execute(HANG)
                began = time.perf_counter()
                _await_verdict(found, Fault.MISSING_RANKS)
                hang.append(time.perf_counter() - began - STALL)
                began = time.perf_counter()
                cluster.abort(reason="bench")
                _await_end(cell)
                abort.append(time.perf_counter() - began)
                began = time.perf_counter()
                cluster.rebuild()
                cluster.execute(SUM).result(WAIT)
                rebuild.append(time.perf_counter() - began)
        finally:
            watch.close()
        for trial in range(trials):
            say(f"  death {trial + 1} of {trials}")
            cell = cluster.execute(KEEP_GOING)
            _await_ops(cluster)
            began = time.perf_counter()
            os.kill(cluster.pids[VICTIM], signal.SIGKILL)
            _await_end(cell)
            death.append(time.perf_counter() - began)
            cluster.restart([VICTIM])
            cluster.rebuild()
            cluster.execute(SUM).result(WAIT)
    return [
        Row.within(f"{what}, {trials} times", took[what], BUDGETS[what])
        for what in took
    ]


def _await_verdict(found: queue.SimpleQueue[list[Verdict]], fault: Fault) -> None:
    deadline = time.monotonic() + WAIT
    while True:
        verdicts = found.get(timeout=max(0.0, deadline - time.monotonic()))
        if any(verdict.fault is fault for verdict in verdicts):
            return


def _await_end(cell: Execution) -> None:
    if not cell.wait(WAIT):
        raise RuntimeError(f"the cell still runs on {cell.ranks_running}")


def _await_ops(cluster: Cluster) -> None:
    """Wait until every rank has an op in flight."""
    before = _issued(cluster)
    deadline = time.monotonic() + WAIT
    while any(now <= then for now, then in zip(_issued(cluster), before, strict=True)):
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks complete no ops")
        time.sleep(0.05)


def _issued(cluster: Cluster) -> list[int]:
    status = cluster.status(fresh=True)
    return [group.issued or 0 for rank in status.ranks for group in rank.groups]
