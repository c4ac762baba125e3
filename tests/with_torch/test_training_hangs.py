"""Hangs of many kinds in a loop that trains with DDP: found, ended, trained on from."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.engines import Cluster, ClusterError, Execution
from tests.with_torch.cells import WAIT, run, values
from tests.with_torch.training_hangs import CONTINUE, HANGS, SETUP, STOP, Hang

pytestmark = [pytest.mark.in_order, pytest.mark.soak]

#: What the process has once nothing refers to the last error of a hang any more.
COUNT = """
import gc, os, sys
from rankscope.backends.torch_watch.creation import known_groups
sys.last_type = sys.last_value = sys.last_traceback = sys.last_exc = None
gc.collect()
"""
OPEN = ["len(known_groups())", "len(os.listdir('/proc/self/fd'))"]
#: Before the first hang.
BEFORE: dict[int, list[int]] = {}
#: Descriptors may differ by those of connections that are made or ended just now.
BRIEF = 5
#: The hang whose test has failed, if one has: its ranks may wait for ever.
FAILED: list[str] = []


@pytest.fixture(scope="module")
def cluster(_module_leaves_nothing: None) -> Iterator[Cluster]:
    """Three ranks of torch that train a model."""
    with Cluster.start(3, torch="gloo", timeout=300) as started:
        started.execute(SETUP, cell=1).result(WAIT)
        run(started, "tp = dist.new_group([0, 1], group_desc='tp')\nmake()\ntrain(2)")
        # From now on every group has a store of its own.
        started.rebuild()
        run(started, "train()")
        BEFORE.update(opened(started))
        assert [BEFORE[rank][0] for rank in range(3)] == [2, 2, 1]
        yield started


def opened(cluster: Cluster) -> dict[int, list[int]]:
    """Return how many groups and descriptors each rank has."""
    # IPython keeps the last error, and its frames keep what a hang has used.
    cluster.execute("raise KeyError").wait(WAIT)
    return values(cluster, COUNT, *OPEN)


def interrupted(cluster: Cluster, execution: Execution) -> bool:
    """Interrupt the ranks that still run a cell; return whether there is none."""
    cluster.interrupt()
    return execution.wait(0.5)


def deaths(cluster: Cluster) -> list[Verdict]:
    """Return the verdicts on dead ranks."""
    found = cluster.diagnose(stall=0.5)
    return [one for one in found if one.fault is Fault.RANK_DEAD]


def verdict_on(cluster: Cluster, hang: Hang) -> Verdict:
    """Wait for the verdict that is expected."""
    found: list[Verdict] = []

    def expected() -> Verdict | None:
        found[:] = cluster.diagnose(stall=0.5)
        for one in found:
            if (one.fault, one.culprits) == (hang.fault, hang.culprits):
                return one
        return None

    try:
        verdict = until(expected, WAIT)
    except AssertionError as error:
        raise AssertionError(f"not {hang.fault}, but {found}") from error
    assert verdict is not None
    return verdict


@pytest.fixture(autouse=True)
def ranks_that_answer() -> None:
    """Fail at once after a hang that has not ended: its ranks serve no other test."""
    if FAILED:
        pytest.fail(f"not run: the test of the hang {FAILED[0]!r} has failed")


@pytest.fixture
def hang(number: int) -> Hang:
    """The hang of a test, which is noted where the test does not come to its end."""
    FAILED.append(HANGS[number].name)
    return HANGS[number]


@pytest.mark.parametrize("number", range(len(HANGS)), ids=[one.name for one in HANGS])
def test_a_hang_is_found_ended_and_trained_on_from(
    cluster: Cluster, hang: Hang, number: int
) -> None:
    cell = 10 + number
    execution = cluster.execute(hang.cell, cell=cell)
    if hang.stopped is not None:
        os.kill(cluster.pids[hang.stopped], STOP)
    try:
        verdict = verdict_on(cluster, hang)
        assert verdict.group.name == hang.group
        assert set(verdict.waiting) <= set(hang.waiting)
        assert hang.said.format(cell=cell) in str(verdict)
        began = time.monotonic()
        if hang.stopped is None:
            cluster.abort(None, "by the test", verdicts=[verdict])
        else:
            with pytest.raises(ClusterError, match="rank 2"):
                cluster.abort(None, "by the test", verdicts=[verdict])
        until(
            lambda: not set(hang.waiting) & set(execution.ranks_running),
            WAIT,
            "the cell to end",
        )
        assert time.monotonic() - began < 10
    finally:
        if hang.stopped is not None:
            os.kill(cluster.pids[hang.stopped], CONTINUE)
    for rank in hang.waiting:
        error = execution.errors[rank]
        assert error.ename == "DistAbortedError"
        assert hang.said.format(cell=cell) in error.evalue
    until(lambda: interrupted(cluster, execution), WAIT, "the other ranks to end")
    cluster.rebuild()
    run(cluster, "train()")
    FAILED.clear()


def test_the_weights_are_those_of_an_undisturbed_run(cluster: Cluster) -> None:
    found = values(
        cluster,
        "disturbed, steps = list(model.parameters()), step\nmake()\ntrain(steps)",
        "steps",
        "all(map(torch.equal, disturbed, model.parameters()))",
    )
    assert {equal for _, equal in found.values()} == {True}
    assert len({steps for steps, _ in found.values()}) == 1
    assert found[0][0] > 2


def test_nothing_is_left_of_the_hangs(cluster: Cluster) -> None:
    # A model whose backward was aborted keeps torch's Work, and that its sockets.
    run(cluster, "for name in ('disturbed', 'other'): globals().pop(name, None)")
    found: dict[int, list[int]] = {}

    def nothing_is_left() -> bool:
        # Threads of gloo close the connections of a group that has gone.
        found.update(opened(cluster))
        return all(
            groups == BEFORE[rank][0] and descriptors <= BEFORE[rank][1] + BRIEF
            for rank, (groups, descriptors) in found.items()
        )

    try:
        until(nothing_is_left, WAIT)
    except AssertionError as error:
        raise AssertionError(f"{found}, before {BEFORE}") from error


def test_a_killed_rank_is_restarted_and_trains_on(cluster: Cluster) -> None:
    execution = cluster.execute("if rank != 2: train()\nelse: never.wait()", cell=9)
    until(lambda: cluster.diagnose(stall=0.5), WAIT, "the ranks to hang")
    os.kill(cluster.pids[2], signal.SIGKILL)
    dead = until(lambda: deaths(cluster), WAIT, "the death to be noticed")
    verdict = next(one for one in dead if one.group.name == "default_pg")
    assert verdict.culprits == (2,)
    cluster.abort(None, "by the test", verdicts=[verdict])
    until(lambda: execution.done, WAIT, "the cell to end")
    for rank in (0, 1):
        assert execution.errors[rank].ename == "DistAbortedError"
        assert "rank 2" in execution.errors[rank].evalue
    cluster.restart([2])
    cluster.execute(SETUP, ranks=[2], cell=1).result(WAIT)
    cluster.rebuild()
    # As in a program: the others' weights and steps go to the rank that has none.
    code = """
        model = DDP(Net() if rank == 2 else model.module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        known = [None if rank == 2 else step]
        dist.broadcast_object_list(known, 0)
        step = known[0]
        train(3)
    """
    found = values(
        cluster, code, "[one.tolist() for one in model.parameters()]", "step"
    )
    assert found[0] == found[1] == found[2]
