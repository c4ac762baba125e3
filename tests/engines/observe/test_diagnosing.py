"""Diagnosis of real ranks: who is missing, who is busy, and when to speak."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.stacks import Frame
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.engines import Cluster, StallWatch
from rankscope.engines.observe.diagnosing import last_seen, library_call
from rankscope.engines.observe.rank_slots import RankSlot
from rankscope.engines.wire.requests import Request
from tests.engines.cluster.faults import all_in_flight, until_at
from tests.widgets import statuses

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start(3, timeout=120) as started:
        yield started


@pytest.fixture(autouse=True)
def _usable_again(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.abort(reason="the test is over")
    cluster.rebuild()


def test_nothing_hangs(cluster: Cluster) -> None:
    execution = cluster.execute("dist.all_reduce(np.ones(3))")
    assert execution.wait(60)
    assert execution.errors == {}
    assert cluster.diagnose() == []


def verdicts_of(cluster: Cluster, waiting: list[int]) -> list[Verdict]:
    """What the diagnosis finds once the ranks in `waiting` are in their op."""
    until(lambda: all_in_flight(cluster, waiting), what="the op")
    return until(cluster.diagnose)


def of_default(cluster: Cluster) -> str:
    """How a verdict names the group: not where it is the only one.

    Other tests of this cluster may have made one.
    """
    return " of group 'default'" if len(cluster.status().groups) > 1 else ""


HANG = """\
import time
if rank == 1:
    time.sleep(90)
dist.all_reduce(np.ones(3))
"""


def test_a_busy_rank_is_named_with_both_lines(cluster: Cluster) -> None:
    execution = cluster.execute(HANG, cell=7)
    until_at(cluster, [1], 7, 3)
    verdicts = verdicts_of(cluster, waiting=[0, 2])
    assert [verdict.fault for verdict in verdicts] == [Fault.RANK_BUSY_ELSEWHERE]
    assert verdicts[0].culprits == (1,)
    assert verdicts[0].waiting == (0, 2)
    assert str(verdicts[0]) == (
        f"rank 1 has not entered all_reduce #1{of_default(cluster)} (cell 7 line 4): "
        "it is at cell 7 line 3; ranks 0, 2 wait in it"
    )
    cluster.abort(reason="seen")
    cluster.interrupt()
    assert execution.wait(30)


def test_the_library_in_which_a_rank_is_busy_is_named(cluster: Cluster) -> None:
    in_psutil = "psutil.wait_procs([psutil.Process(1)], timeout=90)"
    code = HANG.replace("import time", "import psutil")
    execution = cluster.execute(code.replace("time.sleep(90)", in_psutil), cell=10)
    until_at(cluster, [1], 10, 3)
    verdicts = verdicts_of(cluster, waiting=[0, 2])
    where = "it is at cell 10 line 3 in `wait_procs` of psutil/__init__.py"
    assert f"(cell 10 line 4): {where}; ranks 0, 2 wait" in str(verdicts[0])
    cluster.abort(reason="seen")
    cluster.interrupt()
    assert execution.wait(30)


LOST = """\
import queue, threading
loaded = queue.Queue()
def load():
    raise KeyError(7)
if rank == 1:
    threading.Thread(target=load).start()
    loaded.get()
dist.all_reduce(np.ones(3))
"""


def test_that_a_thread_of_the_busy_rank_has_ended_is_told(cluster: Cluster) -> None:
    lost = "a thread of it has ended with KeyError: 7 at cell 11 line 4"
    execution = cluster.execute(LOST, cell=11)
    until_at(cluster, [1], 11, 7)
    verdicts = verdicts_of(cluster, waiting=[0, 2])
    assert f"it is at cell 11 line 7, and {lost}; ranks" in str(verdicts[0])
    cluster.abort(reason="seen")
    cluster.interrupt()
    assert execution.wait(30)
    cluster.rebuild()
    # The next cell does not wait for that thread.
    execution = cluster.execute(HANG, cell=12)
    until_at(cluster, [1], 12, 3)
    verdicts = verdicts_of(cluster, waiting=[0, 2])
    assert "it is at cell 12 line 3; ranks" in str(verdicts[0])
    cluster.abort(reason="seen")
    cluster.interrupt()
    assert execution.wait(30)


def _call(place: str, function: str, internal: bool = False) -> Frame:
    return Frame(place, 3, function, "", internal)


@pytest.mark.parametrize(
    ("frames", "called"),
    [
        (
            [
                _call("Cell In[7]", "<module>"),
                _call(
                    "/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
                    "_BaseDataLoaderIter.__next__",
                ),
                _call("/usr/lib/python3.11/queue.py", "Queue.get"),
                _call("/usr/lib/python3.11/threading.py", "Condition.wait"),
            ],
            "`_BaseDataLoaderIter.__next__` of torch/utils/data/dataloader.py",
        ),
        (
            [
                _call("/home/ada/train.py", "<module>"),
                _call("/env/lib/python3.12/site-packages/torch/nn/module.py", "call"),
                _call("/home/ada/train.py", "forward"),
            ],
            "",
        ),
        (
            [
                _call("Cell In[7]", "<module>"),
                _call("/env/lib/python3.12/site-packages/rankscope/a.py", "wait", True),
                _call("/usr/lib/python3.12/threading.py", "Condition.wait"),
            ],
            "",
        ),
    ],
)
def test_what_is_named_is_what_the_user_has_called(
    frames: list[Frame], called: str
) -> None:
    assert library_call(frames) == called


def test_the_errors_of_an_abort_say_why_the_ranks_waited(cluster: Cluster) -> None:
    execution = cluster.execute(HANG + "print('unreached')", cell=8)
    until_at(cluster, [1], 8, 3)
    until(lambda: cluster.diagnose(), what="the stall")
    cluster.abort(reason="enough")
    cluster.interrupt([1])
    assert execution.wait(30)
    for rank in (0, 2):
        said = execution.errors[rank].evalue
        assert "was aborted: rank 1 has not entered all_reduce #" in said
        assert (
            "(cell 8 line 4): it is at cell 8 line 3; ranks 0, 2 wait in it; enough (at"
            in said
        )
        assert execution.errors[rank].culprits == (1,)
    ((reason, diagnosis),) = {
        (group.reason, group.diagnosis)
        for rank in cluster.status().ranks
        for group in rank.groups
    }
    assert reason is not None
    assert reason.startswith("enough (at ")
    assert diagnosis.startswith("rank 1 has not entered")


def test_an_abort_before_any_op_waits_has_no_diagnosis(cluster: Cluster) -> None:
    cluster.abort(reason="tidy")
    found = [group for rank in cluster.status().ranks for group in rank.groups]
    assert {one.diagnosis for one in found} == {""}
    assert {one.why for one in found} == {one.reason for one in found}


def test_a_rank_that_raised_is_named_with_its_error(cluster: Cluster) -> None:
    code = (
        "x = np.ones(3)\nif rank == 1:\n    raise ValueError('no')\ndist.all_reduce(x)"
    )
    execution = cluster.execute(code, cell=14)
    until(lambda: 1 in execution.errors)
    (verdict,) = verdicts_of(cluster, waiting=[0, 2])
    assert verdict.fault is Fault.MISSING_RANKS
    assert verdict.culprits == (1,)
    assert "(cell 14 line 4): it left cell 14 with ValueError at line 3; ranks" in str(
        verdict
    )
    cluster.abort(reason="seen")
    assert execution.wait(30)
    cluster.rebuild()
    execution = cluster.execute("if rank != 2: dist.barrier()", cell=15)
    until(lambda: execution.ranks_running == [0, 1])
    (verdict,) = verdicts_of(cluster, waiting=[0, 1])
    assert "it left cell 15 at its end" in str(verdict)
    cluster.abort(reason="seen")
    assert execution.wait(30)
    cluster.rebuild()


ELSEWHERE = """\
pair, others = dist.new_group([0, 1]), dist.new_group([1, 2])
if rank < 2:
    dist.all_reduce(np.ones(3 + rank), group=pair)
dist.all_reduce(np.ones(3), group=others) if rank else None
"""


def test_an_error_is_the_cause_of_what_waits_in_another_group(
    cluster: Cluster,
) -> None:
    execution = cluster.execute(ELSEWHERE, cell=16)
    until(lambda: execution.ranks_running == [2])
    (verdict,) = until(cluster.diagnose)
    assert (verdict.fault, verdict.culprits) == (Fault.SIZE_MISMATCH, (0, 1))
    assert "rank 2 waits in all_reduce #1 of group 'ranks 1-2' (cell 16 line 4)" in str(
        verdict
    )
    one = cluster.status().ranks[1]
    assert re.match(
        r"left cell 16 with DistAbortedError at line 3 \(all_reduce: rank [01] sent ",
        one.last_cell_exit,
    )
    assert one.last_cell_op == ("ranks 0-1", "all_reduce", 1)
    cluster.abort(reason="seen")
    assert execution.wait(30)
    cluster.rebuild()
    gone = "dist.destroy_process_group(others if rank == 2 else pair)"
    gone += "\nif rank == 1: dist.destroy_process_group(others)"
    assert cluster.execute(gone).wait(30)


TWINS = """\
hangs, works = (
    dist.new_group([0, one], group_desc="twin") for one in (1, 2)
)
if rank != 1:
    dist.barrier(group=works)
if rank == 0:
    dist.all_reduce(np.ones(3), group=hangs)
"""


def test_of_two_groups_of_one_name_the_one_that_hangs_is_named(
    cluster: Cluster,
) -> None:
    execution = cluster.execute(TWINS, cell=16)
    until(lambda: execution.ranks_running == [0], what="the others to end")
    (verdict,) = until(cluster.diagnose)
    assert verdict.fault is Fault.MISSING_RANKS
    assert verdict.group == GroupKey("twin", (0, 1))
    assert verdict.culprits == (1,)
    cluster.abort(verdict.group, reason="seen")
    assert execution.wait(30)
    states = [(one.key.ranks, one.state) for one in cluster.status().ranks[0].groups]
    assert states[1:] == [((0, 1), "aborted"), ((0, 2), "ready")]


def test_a_missing_rank_and_a_mismatch(cluster: Cluster) -> None:
    execution = cluster.execute("dist.barrier()", ranks=[0, 1], cell=8)
    (verdict,) = verdicts_of(cluster, waiting=[0, 1])
    assert verdict.fault is Fault.MISSING_RANKS
    assert verdict.culprits == (2,)
    cluster.abort(reason="seen")
    assert execution.wait(30)
    cluster.rebuild()

    code = "x = np.ones(3)\nif rank == 2:\n    dist.broadcast(x, 0)\ndist.all_reduce(x)"
    execution = cluster.execute(code, cell=9)
    (verdict,) = verdicts_of(cluster, waiting=[0, 1, 2])
    assert verdict.fault is Fault.OP_MISMATCH
    assert str(verdict) == (
        f"rank 2 issued broadcast #1{of_default(cluster)} (cell 9 line 3) while "
        "ranks 0–1 issued all_reduce #1 (cell 9 line 4)"
    )
    cluster.abort(reason="seen")
    assert execution.wait(30)


def test_the_watch_speaks_when_an_op_stalls_and_when_it_is_over(
    cluster: Cluster,
) -> None:
    told: list[list[Verdict]] = []
    watch = StallWatch(cluster, told.append, stall=1.0)
    try:
        execution = cluster.execute("dist.barrier()", ranks=[0, 2], cell=5)
        # First it may be said of a rank that begins its cell late, too.
        until(lambda: any(one and one[0].culprits == (1,) for one in told))
        cluster.abort(reason="seen")
        assert execution.wait(30)
        cluster.rebuild()
        until(lambda: told[-1] == [])
    finally:
        watch.close()
    until(
        lambda: "rankscope-stall-watch" not in [t.name for t in threading.enumerate()]
    )


def test_the_end_of_a_hang_by_an_abort_asks_each_rank_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status comes with a rank's error; no op is left for what is told of it."""
    told: list[list[Verdict]] = []
    asked: list[tuple[str, int]] = []
    registry: Any = cluster._registry
    post = registry._post

    def note(slot: RankSlot, request: Request[Any]) -> Any:
        name = type(request).__name__
        if name != "Subscribe":
            asked.append((name, slot.rank))
        return post(slot, request)

    watch = StallWatch(cluster, told.append, stall=1.0)
    try:
        execution = cluster.execute("dist.barrier()", ranks=[0, 2], cell=6)
        until(lambda: told and told[-1] and told[-1][0].culprits == (1,))
        monkeypatch.setattr(registry, "_post", note)
        cluster.abort(reason="seen", verdicts=told[-1])
        assert execution.wait(30)
        assert execution.reported == {0, 2}
        status = cluster.glance()
        until(lambda: told[-1] == [])
    finally:
        watch.close()
    assert sorted(asked) == [("Abort", 0), ("Abort", 1), ("Abort", 2)]
    assert [one.busy for one in status.ranks] == [False] * 3
    assert {one.state for rank in status.ranks for one in rank.groups} == {"aborted"}
    monkeypatch.undo()
    cluster.rebuild()
    cluster.execute("dist.barrier()").result(30)


@pytest.mark.parametrize(
    ("found", "seen"),
    [
        ({}, "after all_reduce #2 (cell 7 line 4)"),
        ({"line": "cell 8 line 2"}, "at cell 8 line 2"),
        (
            {"line": "cell 8 line 2", "oldest": statuses.op("barrier", 3)},
            "in barrier #3",
        ),
    ],
)
def test_where_a_dead_rank_was_last_seen(found: dict[str, Any], seen: str) -> None:
    done = statuses.op("all_reduce", 2, source="cell 7 line 4")
    line, oldest = found.get("line", ""), found.get("oldest")
    group = statuses.group("default", completed=done, oldest=oldest)
    assert last_seen(statuses.rank(0, group, line=line)) == seen
