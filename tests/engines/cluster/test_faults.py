"""Engines and side processes die, ranks hang: errors, recovery, what is intact."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankscope.backends import is_gloo_available
from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ClusterError, ExecutionError, RankError
from rankscope.widgets import StatusTable
from tests.engines.cluster.faults import HANG, SUM, WAIT, hanging, sides

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _usable_before_and_after(cluster: Cluster) -> Iterator[None]:
    cluster.execute("mine = rank * 100\n" + SUM).result(WAIT)
    yield
    try:
        cluster.execute(SUM).result(WAIT)
    except (ExecutionError, TimeoutError):
        # One test that fails is enough.
        cluster.restart()
        cluster.rebuild()
        raise


ROOT = Path(__file__).resolve().parents[3]


def kill(cluster: Cluster, rank: int) -> int:
    pid = cluster.pids[rank]
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.parametrize("victim", [2, 0], ids=["rank 2", "the store's host"])
def test_a_killed_engine_in_an_all_reduce(cluster: Cluster, victim: int) -> None:
    cluster.abort(reason="an earlier hang")
    cluster.rebuild()
    cell = hanging(cluster, absent=victim)
    reported: list[tuple[int, str]] = []
    cancel = cluster.subscribe(
        lambda rank, summary: reported.append((rank, summary.dead))
    )
    pid = kill(cluster, victim)
    assert cell.wait(WAIT)
    cancel()
    one = cluster.status().ranks[victim]
    cause = f"killed by SIGKILL (engine {one.engine_id}, pid {pid} on {one.host})"
    death = f"rank {victim} is dead: {cause}"
    assert str(cell.errors[victim]) == f"rank {victim}: EngineDied: {cause}"
    for rank in set(cluster.ranks) - {victim}:
        assert cell.errors[rank].ename == "DistAbortedError"
        assert f"the group was aborted: {death} (at" in cell.errors[rank].evalue
    assert (victim, death) in reported
    assert (one.reason, cluster.where(victim)) == (death, {victim: death})

    with pytest.raises(RankError) as caught:
        cell.result()
    assert (caught.value.rank, caught.value.ename) == (victim, "EngineDied")
    assert caught.value.culprits == (victim,)
    for rank in set(cluster.ranks) - {victim}:
        error = cell.errors[rank]
        assert (error.group, error.op) == ("default", "all_reduce")
        assert isinstance(error.sequence_number, int)
        assert error.culprits == (victim,)
        assert "killed by SIGKILL" in str(error.reason)

    status = cluster.status(fresh=True)
    assert status.dead == [victim]
    assert status.ranks[victim].state == "dead"
    survivors = [rank for rank in cluster.ranks if rank != victim]
    assert {status.ranks[r].groups[0].state for r in survivors} == {"aborted"}
    assert cluster.execute("1", ranks=victim).errors[victim].ename == "EngineDied"
    with pytest.raises(ClusterError, match="killed by SIGKILL"):
        cluster.pull("mine", victim)
    with pytest.raises(ClusterError, match=rf"%dist_restart {victim} "):
        cluster.rebuild()

    cluster.restart([victim])
    assert cluster.status().dead == []
    assert cluster.pull("mine", survivors) == {r: r * 100 for r in survivors}
    # The fresh engine is where the others are: not in what they have left behind.
    refused = cluster.execute("dist.barrier()", ranks=victim)
    assert refused.wait(WAIT)
    # What comes first: the reason of the others, from the store, or the notebook's.
    whys = f"{re.escape(death)}|rank {victim} restarted"
    told = refused.errors[victim].evalue
    assert re.search(rf"the group was aborted: ({whys}) \(at", told)
    cluster.rebuild()
    assert {one.groups[0].state for one in cluster.status().ranks} == {"ready"}
    environment = cluster.execute("import os\n(rank, os.environ['RANK'])", ranks=victim)
    shown = environment.result(WAIT).outputs(victim)[0]["data"]["text/plain"]
    assert shown == f"({victim}, '{victim}')"


#: A group over sockets, whose ranks notice at once that one of them is gone.
REGISTER = f"""
import sys, threading
sys.path.insert(0, {str(ROOT)!r})
from tests.backends import socket_backend
socket_backend.register()
"""
SOCKETS = f"""{REGISTER}
direct = dist.new_group(backend="sockets", group_desc="direct")
dist.barrier(group=direct)
"""
LOSES = """
if rank == 2:
    threading.Event().wait()
try:
    dist.all_reduce(np.ones(3), group=direct)
except dist.DistAbortedError as error:
    told = (str(error), error.reason, error.culprits)
"""


def test_a_killed_engine_whose_connections_close_at_once(cluster: Cluster) -> None:
    cluster.execute(SOCKETS).result(WAIT)
    cell = cluster.execute(LOSES, cell=51)
    survivors = [0, 1, 3]
    until(lambda: all_in(cluster, "direct", survivors), WAIT, "the op to start")
    pid = kill(cluster, 2)
    assert cell.wait(WAIT)
    told = cluster.pull("told", survivors)
    for rank, (text, reason, culprits) in told.items():
        assert f"all_reduce #2 of group 'direct' on rank {rank} (cell 51" in text
        dead = f"killed by SIGKILL (engine {cluster.engine_ids[2]}, pid {pid}"
        assert f"rank 2 is dead: {dead}" in reason
        assert culprits == (2,)
    # A fresh engine has the group, and has not run what the cell called.
    cluster.restart([2])
    cluster.rebuild()
    refused = cluster.execute("dist.barrier()", ranks=2, group="direct")
    assert refused.wait(WAIT)
    assert (
        "barrier in group 'direct' on rank 2: no backend 'sockets' is registered on "
        "this rank: importing 'tests.backends.socket_backend' does not register it; "
        "run the code that registered it on the other ranks on this rank, too"
    ) in refused.errors[2].evalue
    cluster.execute(REGISTER, ranks=2).result(WAIT)
    cluster.execute("dist.barrier()", group="direct").result(WAIT)
    cluster.execute(DESTROY.format("direct")).result(WAIT)


def test_a_rank_that_destroys_its_groups_gets_them_back(cluster: Cluster) -> None:
    cluster.execute("pair = dist.new_group([1, 2], group_desc='pair')").result(WAIT)
    cell = cluster.execute(
        "if rank == 1:\n    dist.destroy_process_group()\n"
        "else:\n    dist.all_reduce(np.ones(3))"
    )
    assert cell.wait(WAIT)
    assert set(cell.errors) == set(cluster.ranks) - {1}
    for error in cell.errors.values():
        assert error.ename == "DistAbortedError"
        assert "rank 1 left group 'default' by destroy_process_group()" in error.evalue
        assert "; %dist_rebuild makes this one anew on all ranks" in error.evalue
        assert "rebuild_process_group" not in error.evalue
    cluster.rebuild()
    cluster.execute("mine += 1\n" + SUM).result(WAIT)
    cluster.execute("dist.barrier()", group="pair").result(WAIT)
    destroy = (
        'if rank in (1, 2):\n    dist.destroy_process_group(world.get_group("pair"))'
    )
    imports = "from rankscope.backends.groups.world import world\n"
    cluster.execute(imports + destroy).result(WAIT)


def test_groups_that_a_cell_makes_anew_are_replaced_and_left_like_the_first_ones(
    cluster: Cluster,
) -> None:
    """They meet at a store of their own, and go on in the cluster's once rebuilt."""
    again = "dist.destroy_process_group()\ndist.init_process_group()\n" + SUM
    # Of one generation and name as what is left of the first ones in that store.
    cluster.rebuild()
    cluster.execute(again + "\ndist.barrier()" * 3).result(WAIT)
    cluster.execute(again).result(WAIT)
    cell = hanging(cluster, absent=2)
    # Rank 2 has not issued the barrier of this number: that was in the group before.
    until(lambda: bool(cluster.diagnose()), WAIT, "a verdict")
    (found,) = cluster.diagnose()
    assert (found.culprits, found.op, found.seq) == ((2,), "all_reduce", 2)
    assert "rank 2 has not entered all_reduce #2" in str(found)
    kill(cluster, 2)
    assert cell.wait(WAIT)
    cluster.restart([2])
    cluster.rebuild()
    cluster.execute(SUM).result(WAIT)
    # The port of the first store is free again.
    cluster.execute(again).result(WAIT)


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise SystemExit(3)"])
def test_sys_exit_in_a_cell_is_an_error_as_any_other(
    cluster: Cluster, code: str
) -> None:
    before = cluster.pids
    cell = cluster.execute(f"if rank == 1:\n    {code}\ndist.barrier()")
    until(lambda: 1 in cell.errors, what="the error of rank 1")
    assert (cell.errors[1].ename, cell.errors[1].evalue) == ("SystemExit", "3")
    # For so long, nothing has stalled.
    until(lambda: bool(cluster.diagnose()), WAIT, what="a verdict")
    cluster.abort()
    assert cell.wait(WAIT)
    for rank in set(cluster.ranks) - {1}:
        error = cell.errors[rank]
        assert error.culprits == (1,)
        assert "it left its cell with SystemExit" in error.evalue
    cluster.rebuild()
    assert cluster.pids == before


DESTROY = """
from rankscope.backends.groups.world import world
dist.destroy_process_group(world.get_group("{}"))
"""
CELL_BACKEND = """
class Nothing(dist.Backend):
    interface_version = 1

    def barrier(self):
        work = dist.Work()
        work.mark_started()
        work.mark_completed()
        return work

make = lambda s, r, n, t: Nothing(r, n)
dist.Backend.register_backend("nothing", make, devices="cpu")
"""


def test_a_fresh_engine_lacks_a_backend_that_only_a_cell_registered(
    cluster: Cluster,
) -> None:
    group = 'dist.new_group([1, 2], backend="cpu:nothing", group_desc="cells")\n'
    cluster.execute(CELL_BACKEND + group).result(WAIT)
    cluster.restart([1, 3])
    assert cluster.advice == (
        "rank 1 has no backend 'nothing', which a cell registered on the other ranks: "
        "run that cell there, too (%%distributed -r 1)"
    )
    cluster.rebuild()
    refused = cluster.execute("dist.barrier()", ranks=1, group="cells")
    assert refused.wait(WAIT)
    assert "run that cell on this rank, too" in refused.errors[1].evalue
    cluster.execute(CELL_BACKEND, ranks=1).result(WAIT)
    cluster.execute("dist.barrier()", group="cells").result(WAIT)
    cluster.execute(DESTROY.format("cells"), ranks=[1, 2]).result(WAIT)


def all_in(cluster: Cluster, group: str, ranks: Sequence[int]) -> bool:
    known = cluster.status(fresh=True).ranks
    found = [known[rank].group(group) for rank in ranks]
    return all(one is not None and one.in_flight for one in found)


def test_the_default_has_no_process_beyond_the_ranks(cluster: Cluster) -> None:
    assert [sides(pid) for pid in cluster.pids.values()] == [[]] * 4


def test_the_transports_of_the_default_are_told(cluster: Cluster) -> None:
    status = cluster.status(fresh=True)
    for one in status.ranks:
        others = tuple(rank for rank in cluster.ranks if rank != one.rank)
        # The system may forbid the reads of another rank's memory.
        assert one.groups[0].transports in ({"unix,cma": others}, {"unix": others})
    assert "unix" in str(StatusTable(status))


@pytest.mark.skipif(not is_gloo_available(), reason="needs gloo")
def test_a_killed_side_process(cluster: Cluster) -> None:
    make = 'dist.new_group(backend="cpu:gloo", group_desc="gloo")\n'
    cluster.execute(make).result(WAIT)
    cell = cluster.execute(HANG.format(absent=3), group="gloo")
    until(lambda: all_in(cluster, "gloo", [0, 1, 2]), WAIT, "the collective to start")
    victim = 1
    killed = sides(cluster.pids[victim])
    assert killed
    for side in killed:
        side.kill()
    until(lambda: cell.ranks_running == [3], WAIT, "the ranks in it to end")
    assert sorted(cell.errors) == [0, 1, 2]
    assert "side process" in cell.errors[victim].evalue
    assert cluster.interrupt() == [3]
    assert cell.wait(WAIT)
    assert cluster.status().dead == []
    cluster.rebuild()
    cluster.execute(DESTROY.format("gloo")).result(WAIT)


def test_abort_releases_a_hang(cluster: Cluster) -> None:
    cell = hanging(cluster, absent=0)
    assert cluster.abort(reason="enough of it") == {r: ["default"] for r in range(4)}
    until(lambda: cell.ranks_running == [0], WAIT, "the waiting ranks to end")
    assert {cell.errors[r].ename for r in (1, 2, 3)} == {"DistAbortedError"}
    assert all("enough of it" in cell.errors[r].evalue for r in (1, 2, 3))
    group = cluster.status().ranks[1].groups[0]
    assert (group.state, "enough of it" in (group.reason or "")) == ("aborted", True)
    cluster.interrupt()
    assert cell.wait(WAIT)
    cluster.rebuild("default")


def test_rebuild_frees_a_group_that_hangs(cluster: Cluster) -> None:
    cell = hanging(cluster, absent=2)
    cluster.rebuild()
    until(lambda: cell.ranks_running == [2], WAIT, "the waiting ranks to end")
    assert all("being rebuilt" in cell.errors[r].evalue for r in (0, 1, 3))
    cluster.interrupt()
    assert cell.wait(WAIT)


def test_an_interrupt_in_a_collective(cluster: Cluster) -> None:
    cell = hanging(cluster, absent=1)
    assert cluster.interrupt() == [0, 1, 2, 3]
    assert cell.wait(WAIT)
    assert {one.ename for one in cell.errors.values()} == {"KeyboardInterrupt"}
    assert {one.line for one in cell.errors.values()} == {4, 5}
    cluster.rebuild()


def test_a_subgroup_lives_on_without_a_dead_rank(cluster: Cluster) -> None:
    cluster.execute(
        "low = dist.new_group([0, 1], group_desc='low')\n"
        "high = dist.new_group([2, 3], group_desc='high')"
    ).result(WAIT)
    code = "z = np.ones(3)\ndist.all_reduce(z)\nassert (z == 2).all()"
    cluster.execute(code, group="high").result(WAIT)
    kill(cluster, 0)
    until(lambda: cluster.status().dead == [0], WAIT, "the death to be noticed")
    with pytest.raises(ClusterError, match="'low' cannot be rebuilt: rank 0 is dead"):
        cluster.rebuild("low")
    # Rank 0 hosted the store: another has to.
    cluster.rebuild("high")
    cluster.execute(code, group="high").result(WAIT)
    # The fresh rank is in both its groups.
    cluster.restart()
    cluster.rebuild()


#: The agent hears of a death once the next cell has made its group.
HEARS_LATE = """
import threading
from rankscope.backends.groups.world import world
made, told = threading.Event(), threading.Event()
def abort(*groups, **how):
    made.wait(20)
    try:
        return type(world).abort(world, *groups, **how)
    finally:
        told.set()
world.abort = abort
"""
SURVIVORS = f"""
some = dist.new_group([0, 1, 3], group_desc='some')
made.set()
assert told.wait({WAIT})
del world.abort
dist.barrier(group=some)
"""


def test_a_death_that_is_told_late_leaves_the_group_of_the_survivors(
    cluster: Cluster,
) -> None:
    cluster.execute(HEARS_LATE, ranks=[0, 1, 3]).result(WAIT)
    kill(cluster, 2)
    until(lambda: cluster.status().dead == [2], WAIT, "the death to be noticed")
    cluster.execute(SURVIVORS, ranks=[0, 1, 3]).result(WAIT)
    cluster.restart([2])
    cluster.rebuild()


def test_a_living_rank_is_restarted_in_the_middle_of_a_cell(cluster: Cluster) -> None:
    # Why an earlier generation ended is still in the store.
    cluster.abort(reason="an old hang")
    cluster.rebuild()
    make = "trio = dist.new_group([0, 1, 3], group_desc='trio', timeout=77)"
    cluster.execute(make).result(WAIT)
    before = dict(cluster.pids)
    restarted = psutil.Process(before[1])
    cell = hanging(cluster, absent=1)
    cluster.restart([1])
    assert cell.wait(WAIT)
    assert all("rank 1 restarted" in one.evalue for one in cell.errors.values())
    assert {r for r in range(4) if cluster.pids[r] != before[r]} == {1}
    until(lambda: not lives(restarted), WAIT, "the former engine to end")
    with pytest.raises(ClusterError, match="rank 1: there is no variable"):
        cluster.pull("mine")
    # It has the groups that the others have, in the state that theirs are in.
    group = cluster.status(fresh=True).ranks[1].group("trio")
    assert group is not None
    assert (group.ranks, group.timeout, group.state) == ((0, 1, 3), 77.0, "aborted")
    found = [one.group("default") for one in cluster.status().ranks]
    assert len({one.generation for one in found if one is not None}) == 1
    assert all("rank 1 restarted" in str(one and one.reason) for one in found)
    cluster.rebuild()
    cluster.execute("dist.barrier()", group="trio").result(WAIT)


def test_aborting_and_rebuilding_leaks_nothing(cluster: Cluster) -> None:
    def usage() -> dict[int, Any]:
        # What is garbage in a cycle is no leak.
        cluster.execute("import gc\ngc.collect()").result(WAIT)
        found = {}
        for rank, pid in cluster.pids.items():
            engine = psutil.Process(pid)
            children = [one for one in engine.children() if lives(one)]
            found[rank] = (engine.num_fds(), engine.num_threads(), len(children))
        return found

    def cycle() -> None:
        cluster.abort(reason="again")
        cluster.rebuild()
        cluster.execute(SUM).result(WAIT)

    cycle()
    before = usage()
    for _ in range(4):
        cycle()
    until(
        lambda: all(
            now <= then
            for rank in before
            for now, then in zip(usage()[rank], before[rank], strict=True)
        ),
        WAIT,
        "descriptors, threads and processes to be as before",
    )
