"""Why a group was aborted: who, when and why, on every rank, and for good."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
from tests.engines.cluster.faults import SUM, WAIT, all_in_flight, hanging

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _usable_again(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.abort(reason="the test is over")
    cluster.interrupt()
    cluster.rebuild()


#: What the others wait in while rank 1 ends it.
WAITING = """
work = dist.all_reduce(np.ones(10), async_op=True)
try:
    work.wait()
except dist.DistError as error:
    said = f"{type(error).__name__}: {error}"
"""
ABORT = "work = None\ndist.abort_process_group(reason='the loss is NaN')"

#: What an old Work says of itself.
OLD = """
again = None
if work is not None:
    try:
        work.wait()
    except dist.DistError as error:
        again = f"{type(error).__name__}: {error}"
    assert work.is_completed() and not work.is_success()
    assert again == said, again
    assert work.exception() is not None
"""

TIMEOUT = """
quick = dist.new_group(timeout=1.0, group_desc="quick")
said = ""
try:
    dist.all_reduce(np.ones(10), group=quick)
except dist.DistError as error:
    said = f"{type(error).__name__}: {error}"
"""


def test_a_rank_aborts_and_all_say_who_when_and_why(cluster: Cluster) -> None:
    cell = cluster.execute(WAITING, ranks=[0, 2, 3], cell=3)
    until(lambda: all_in_flight(cluster, [0, 2, 3]), WAIT, "the others to wait")
    cluster.execute(ABORT, ranks=1).result(WAIT)
    cell.result(WAIT)
    said = cluster.pull("said", [0, 2, 3])
    for rank, text in said.items():
        assert re.fullmatch(
            rf"DistAbortedError: all_reduce #\d+ of group 'default' on rank {rank} "
            r"\(cell 3 line 1\): the group was aborted: the loss is NaN "
            r"\(at \d\d:\d\d:\d\d, by rank 1\); .*%dist_rebuild",
            text,
        )
    # Who comes later, from wherever, changes nothing.
    cluster.abort(reason="too late")
    cluster.execute("dist.abort_process_group(reason='later still')").result(WAIT)
    reasons = {one.group("default").reason for one in cluster.status(fresh=True).ranks}
    (reason,) = reasons
    assert reason is not None
    assert re.fullmatch(r"the loss is NaN \(at \d\d:\d\d:\d\d, by rank 1\)", reason)
    cell = cluster.execute("dist.barrier()")
    assert cell.wait(WAIT)
    assert all("the loss is NaN (at" in one.evalue for one in cell.errors.values())
    assert sorted(cell.errors) == cluster.ranks

    cluster.rebuild()
    cluster.execute(SUM).result(WAIT)
    assert all(one.groups[0].reason is None for one in cluster.status(fresh=True).ranks)
    # A Work of the generation before stays what it was.
    cluster.execute(OLD).result(WAIT)


def test_the_notebook_aborts(cluster: Cluster) -> None:
    cell = hanging(cluster, absent=0)
    cluster.abort("default", reason="looked long enough")
    cluster.interrupt(0)
    assert cell.wait(WAIT)
    for rank in (1, 2, 3):
        said = cell.errors[rank].evalue
        assert re.search(r"looked long enough \(at [\d:]+, by the notebook\)", said)
        assert f"of group 'default' on rank {rank} (cell 50 line 5)" in said
    cluster.rebuild()


def test_a_group_has_its_own_timeout(cluster: Cluster) -> None:
    """One rank is missing: the first to time out says so, and the group is over."""
    cell = cluster.execute(TIMEOUT, ranks=[0, 1, 2])
    cell.result(WAIT)
    kinds = set()
    for rank, said in cluster.pull("said", [0, 1, 2]).items():
        kinds.add(said.partition(":")[0])
        assert f"of group 'quick' on rank {rank}" in said
        assert re.search(r"(not done 1 s after it began|timed out after 1 s)", said)
    assert "DistTimeoutError" in kinds
    assert kinds <= {"DistTimeoutError", "DistAbortedError"}
    # The default group has nothing to do with it.
    cluster.execute(SUM).result(WAIT)
    # The rank that never made the group has it after a rebuild, like the others.
    assert cluster.status(fresh=True).ranks[3].group("quick") is None
    cluster.rebuild()
    cluster.execute("dist.barrier()", group="quick").result(WAIT)


def test_a_wait_may_have_its_own_timeout(cluster: Cluster) -> None:
    """It ends the wait and not the op."""
    code = """
    work = dist.all_reduce(np.ones(10), async_op=True)
    try:
        work.wait(0.2)
    except dist.DistTimeoutError as error:
        said = str(error)
    """
    cluster.execute(code, ranks=[0, 1, 2]).result(WAIT)
    for rank, said in cluster.pull("said", [0, 1, 2]).items():
        assert f"on rank {rank}" in said
        assert "was not done after wait(timeout=0.2 s); it is still in flight" in said
    until(lambda: all_in_flight(cluster, [0, 1, 2]), WAIT, "the op to be shown")
    cluster.execute("dist.all_reduce(np.ones(10))", ranks=3).result(WAIT)
    cluster.execute("assert work.wait(5)", ranks=[0, 1, 2]).result(WAIT)
