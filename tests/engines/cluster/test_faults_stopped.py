"""A rank is stopped (SIGSTOP), a notebook re-attaches, a controller dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.engines import Cluster, ClusterError, StallWatch
from tests.engines.cluster.faults import SUM, WAIT, hanging, left_hanging

pytestmark = pytest.mark.processes

#: Rank 2 sleeps in a C function that keeps the GIL.
HOLDS_GIL = """
import ctypes, pathlib
x = np.ones(1000, np.float32)
if rank == 2:
    pathlib.Path({begins!r}).touch()
    ctypes.PyDLL(None).sleep(60)
dist.all_reduce(x)
"""


@pytest.fixture
def stopped(cluster: Cluster) -> Iterator[int]:
    """Stops rank 1 in a hang that rank 3 causes; the number of the stopped rank."""
    yield 1
    process = psutil.Process(cluster.pids[1])
    process.resume()


def test_a_stopped_rank(cluster: Cluster, stopped: int) -> None:
    cluster.execute("mine = rank * 100\n" + SUM).result(WAIT)
    cell = hanging(cluster, absent=3)
    os.kill(cluster.pids[stopped], signal.SIGSTOP)
    until(lambda: _state(cluster, stopped) == "unreachable", WAIT, "the silence")
    (verdict, *_) = until(cluster.diagnose, WAIT)
    assert verdict.culprits == (stopped,)
    process = f"engine {cluster.engine_ids[1]}, pid {cluster.pids[1]} on "
    assert str(verdict).startswith(f"rank 1 ({process}")
    assert ": its process is stopped (SIGSTOP, or a debugger): kill" in str(verdict)
    # The others are let go at once; who did not answer is named.
    said = r"^rank 1: no answer within 2 s; .* in flight on ranks 0, 2–3 is aborted$"
    with pytest.raises(ClusterError, match=said):
        cluster.abort(reason="rank 1 is stopped")
    until(lambda: cell.ranks_running == [stopped, 3], WAIT, "the others to end")
    assert {r: cell.errors[r].ename for r in cell.errors} == {
        0: "DistAbortedError",
        2: "DistAbortedError",
    }
    with pytest.raises(ClusterError, match="'default' cannot be rebuilt: rank 1: no a"):
        cluster.rebuild()
    assert cluster.interrupt([1, 3]) == [1, 3]
    until(lambda: cell.ranks_running == [stopped], WAIT, "rank 3 to end")

    os.kill(cluster.pids[stopped], signal.SIGCONT)
    # It does now what it was asked while it was stopped.
    assert cell.wait(WAIT)
    assert cell.errors[stopped].ename in ("DistAbortedError", "KeyboardInterrupt")
    until(lambda: _state(cluster, stopped) == "idle", WAIT, "rank 1 to be heard of")
    cluster.rebuild()
    cluster.execute(SUM).result(WAIT)
    assert cluster.pull("mine") == {rank: rank * 100 for rank in range(4)}


@pytest.mark.soak
def test_a_rank_is_not_given_up_however_long_it_is_stopped(
    cluster: Cluster, stopped: int
) -> None:
    cluster.execute("mine = rank * 100").result(WAIT)
    os.kill(cluster.pids[stopped], signal.SIGSTOP)
    # Of itself ipyparallel's controller gives up an engine after half a minute.
    long = time.monotonic() + 36
    until(lambda: time.monotonic() > long, 2 * WAIT, "half a minute and more")
    assert _state(cluster, stopped) == "unreachable"
    os.kill(cluster.pids[stopped], signal.SIGCONT)
    until(lambda: _state(cluster, stopped) == "idle", WAIT, "rank 1 to be heard of")
    cluster.execute(SUM).result(WAIT)
    assert cluster.pull("mine") == {rank: rank * 100 for rank in range(4)}


def test_a_stopped_rank_is_restarted(cluster: Cluster) -> None:
    cluster.execute("mine = rank * 100\n" + SUM).result(WAIT)
    cell = hanging(cluster, absent=0)
    process = psutil.Process(cluster.pids[2])
    process.suspend()
    cluster.restart([2])
    until(lambda: cell.ranks_running == [0], WAIT, "the ranks in it to end")
    assert cell.errors.keys() == {1, 2, 3}
    until(lambda: not lives(process), WAIT, "the stopped engine to end")
    cluster.interrupt(0)
    assert cell.wait(WAIT)
    cluster.rebuild()
    cluster.execute(SUM).result(WAIT)
    assert cluster.pull("mine", [0, 1, 3]) == {0: 0, 1: 100, 3: 300}


@pytest.mark.parametrize("how", ["stopped", "holds the GIL"])
def test_a_frozen_rank_is_named_within_seconds(
    cluster: Cluster, how: str, tmp_path: Path
) -> None:
    cluster.execute("mine = rank * 100\n" + SUM).result(WAIT)
    process = psutil.Process(cluster.pids[2])
    frozen = threading.Event()
    found: list[tuple[float, Verdict]] = []

    def told(verdicts: list[Verdict]) -> None:
        if frozen.is_set():
            found.extend((time.monotonic(), one) for one in verdicts)

    watch = StallWatch(cluster, told)
    try:
        if how == "stopped":
            cell = hanging(cluster, absent=2, cell=51)
            process.suspend()
        else:
            begins = tmp_path / "begins"
            cell = cluster.execute(HOLDS_GIL.format(begins=str(begins)), cell=51)
            until(begins.exists, WAIT, "rank 2 to sleep with the GIL")
        began = time.monotonic()
        frozen.set()
        until(lambda: found, WAIT, "a verdict")
        at, verdict = found[0]
        assert verdict.fault is Fault.RANK_NOT_RESPONDING
        assert verdict.culprits == (2,)
        cause = "process is stopped (" if how == "stopped" else "a call holds the GIL"
        assert cause in str(verdict)
        assert "%dist_restart 2 replaces it" in str(verdict)
        # 2.4 to 2.8 s after the last heartbeat, where the machine is not busy.
        assert at - began < 10
        # Who attaches now reads of the rank in the cluster's file. It does not wait for
        # one that is stopped.
        patience = 3600 if how == "stopped" else 3
        guest = Cluster.attach(
            cluster_id=cluster.cluster_id, attach_timeout=patience, briefly=True
        )
        pids = guest.pids
        guest.close()
        assert pids == cluster.pids
    finally:
        watch.close()
    cluster.restart([2])
    until(lambda: cell.done, WAIT, "the ranks in the op to end")
    cluster.rebuild()
    cluster.execute(SUM).result(WAIT)
    assert cluster.pull("mine", [0, 1, 3]) == {0: 0, 1: 100, 3: 300}


def test_the_errors_of_ops_that_time_out_name_the_stopped_rank(
    cluster: Cluster, stopped: int
) -> None:
    cluster.execute(SUM).result(WAIT)
    found: list[Verdict] = []
    watch = StallWatch(cluster, found.extend)
    try:
        os.kill(cluster.pids[stopped], signal.SIGSTOP)
        cell = cluster.execute(
            "with dist.op_timeout(8):\n    dist.all_reduce(np.ones(3))",
            ranks=[0, 2, 3],
        )
        until(lambda: found, WAIT, "a verdict")
        assert cell.wait(WAIT)
    finally:
        watch.close()
    enames = [cell.errors[rank].ename for rank in (0, 2, 3)]
    assert "DistTimeoutError" in enames
    for rank in (0, 2, 3):
        error = cell.errors[rank]
        assert ": diagnosis at" in error.evalue
        assert "its process is stopped (SIGSTOP, or a debugger)" in error.evalue
        assert error.culprits == (stopped,)
    os.kill(cluster.pids[stopped], signal.SIGCONT)
    until(lambda: _state(cluster, stopped) == "idle", WAIT, "rank 1 to be heard of")
    cluster.rebuild()
    cluster.execute(SUM).result(WAIT)


def _state(cluster: Cluster, rank: int) -> str:
    return cluster.status().ranks[rank].state


@pytest.mark.usefixtures("no_leaks")
def test_a_notebook_comes_back_to_ranks_that_hang() -> None:
    processes = left_hanging("reattached")
    cluster = Cluster.attach(cluster_id="reattached", attach_timeout=WAIT)
    try:
        status = cluster.status(fresh=True)
        assert status.groups == {"default": [0, 1, 2, 3], "pair": [1, 3]}
        assert {one.state for one in status.ranks} == {"busy"}
        assert {one.cell for one in status.ranks} == {7}
        (verdict,) = until(cluster.diagnose, WAIT)
        assert verdict.culprits == (2,)
        assert "all_reduce #1 of group 'default' (cell 7 line 5)" in str(verdict)
        aborted = cluster.abort("default", reason="back again")
        assert aborted == {rank: ["default"] for rank in range(4)}
        assert cluster.interrupt(2) == [2]
        until(
            lambda: {one.state for one in cluster.status(fresh=True).ranks} == {"idle"},
            WAIT,
            "the ranks to be free",
        )
        group = cluster.status().ranks[0].group("default")
        assert group is not None
        assert group.timeout == 600
        assert "back again" in (group.reason or "")
        cluster.rebuild()
        cluster.execute(SUM).result(WAIT)
        cluster.execute("dist.barrier()", group="pair").result(WAIT)
        assert cluster.pull("mine") == {rank: rank * 100 for rank in range(4)}
        # Its launchers are known again, so a dead rank can be started anew.
        os.kill(cluster.pids[3], signal.SIGKILL)
        until(lambda: cluster.status().dead == [3], WAIT, "the death")
        cluster.restart([3])
        cluster.rebuild()
        cluster.execute(SUM).result(WAIT)
    finally:
        cluster.shutdown()
    until(lambda: not any(map(lives, processes)), WAIT, "the cluster to end")


@pytest.mark.usefixtures("no_leaks")
def test_a_dead_controller() -> None:
    """Nobody can be reached: everything says so at once, and the end still works."""
    with Cluster.start(2, timeout=600) as cluster:
        cell = cluster.execute("if rank:\n    dist.barrier()\nelse:\n    input")
        assert cluster._launched is not None
        controller = cluster._launched.cluster.controller.process
        processes = cluster._launched.processes()
        psutil.Process(controller.pid).kill()
        assert cell.wait(WAIT)
        # Cell, status, abort, rebuild, pull: each names the controller.
        assert "the controller is dead: killed by SIGKILL (pid" in cell.errors[1].evalue
        assert cluster.status().dead == [0, 1]
        assert "killed by SIGKILL" in str(cluster.status().ranks[0].reason)
        assert cluster.abort() == {}
        with pytest.raises(ClusterError, match="every engine is gone"):
            cluster.rebuild()
        with pytest.raises(ClusterError, match="start another"):
            cluster.pull("rank")
        with pytest.raises(ClusterError, match="the controller"):
            cluster.restart([0])
        assert cluster.execute("1").errors.keys() == {0, 1}
        told = threading.Event()
        cluster.execute("1").on_done(lambda execution: told.set())
        assert told.wait(WAIT)
    assert not any(map(lives, processes))
