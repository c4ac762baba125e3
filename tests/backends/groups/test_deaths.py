"""A rank of a plain script that is gone: the others hear of it from the store."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, Ranks, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.stores.tcp import TCPStore
from tests.backends import socket_backend
from tests.backends.scripts import script

ROOT = Path(__file__).resolve().parents[3]
KEY = b"the key of this test"


def bereaved(me: Rank, victim: int) -> None:
    """The others end with a reason; where the store lives on they go on together."""
    dist.init_process_group("tcp", timeout=60)
    apart = dist.new_group([0, 2])
    dist.barrier()
    if me.rank == victim:
        me.report("ready")
        me.listen(60)
        return
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    me.report("ready")
    with pytest.raises(dist.DistAbortedError) as caught:
        work.wait()
    me.report(str(caught.value))
    if victim:
        # A group that it was not in is as it was.
        assert isinstance(apart, dist.ProcessGroup)
        assert apart.aborted is None
        x = np.full(3, me.rank + 1.0)
        dist.all_reduce(x, group=dist.shrink_group([victim]))
        assert x[0] == 4
    me.report("done")


@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank(victim: int) -> None:
    with Ranks(3, bereaved, victim) as ranks:
        for rank in range(3):
            ranks.next_report(rank)
        others = [rank for rank in range(3) if rank != victim]
        began = time.monotonic()
        ranks.kill(victim)
        for rank in others:
            said = ranks.next_report(rank, 30)
            assert time.monotonic() - began < 20
            assert "all_reduce #2" in said
            if victim:
                pid = ranks.pids[victim]
                assert f"rank 1 (process {pid} on " in said
                assert "is gone: killed by SIGKILL (at" in said
            else:
                assert "the process of rank 0 ended (killed by SIGKILL)" in said
        for rank in others:
            assert ranks.next_report(rank, 30) == "done"


def bereaved_at_once(me: Rank, victim: int, aborts: bool) -> None:
    """The backend of the others reports closed connections before the store does."""
    socket_backend.register()
    dist.init_process_group("sockets", timeout=60)
    dist.barrier()
    me.report("ready")
    if me.rank == victim:
        me.listen(60)
        if aborts:
            dist.abort_process_group(reason="the loss is NaN")
        return
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    me.report("in flight")
    with pytest.raises(dist.DistAbortedError) as caught:
        work.wait()
    error = caught.value
    me.report((str(error), error.reason, error.culprits))
    # The one that hosts the store is the last to leave.
    me.listen(60)


@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_whose_connections_close_at_once(victim: int) -> None:
    with Ranks(3, bereaved_at_once, victim, False) as ranks:
        others = [rank for rank in range(3) if rank != victim]
        for rank in (*range(3), *others):
            ranks.next_report(rank)
        ranks.kill(victim)
        told = [ranks.next_report(rank, 30) for rank in others]
        for rank in others:
            ranks.tell(rank, "done")
    for rank, (text, reason, culprits) in zip(others, told, strict=True):
        assert f"all_reduce #2 of group 'default' on rank {rank}" in text
        assert "lost the connection to rank" not in text
        assert culprits == (victim,)
        if victim:
            assert f"rank 1 (process {ranks.pids[1]} on " in reason
            assert reason.endswith("is gone: killed by SIGKILL")
        else:
            assert "the process of rank 0 ended (killed by SIGKILL)" in reason


@pytest.mark.processes
def test_an_abort_that_closes_connections_at_once() -> None:
    with Ranks(3, bereaved_at_once, 1, True) as ranks:
        for rank in (0, 1, 2, 0, 2):
            ranks.next_report(rank)
        ranks.tell(1, "abort")
        told = [ranks.next_report(rank, 30) for rank in (0, 2)]
        for rank in (0, 2):
            ranks.tell(rank, "done")
    for text, reason, culprits in told:
        assert reason == "the loss is NaN"
        assert "by rank 1" in text
        assert culprits == ()


RAISES = """
import numpy as np
import rankscope as dist

dist.init_process_group(timeout=60)
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("boom")
try:
    dist.all_reduce(np.ones(3))
except dist.DistAbortedError as error:
    print(error)
"""

LEAVES = """
import sys, time
import rankscope as dist

dist.init_process_group(timeout=60)
pair = dist.new_group([0, 2])
dist.barrier()
if dist.get_rank() == 1:
    sys.exit()
# For longer than it would take to hear of a death.
for _ in range(30):
    time.sleep(0.05)
    dist.barrier(group=pair)
print(dist.group.WORLD.aborted)
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_a_rank_that_raises() -> None:
    (_, zero), (code, one), (_, two) = run_ranks(3, script, RAISES)
    assert code == 1
    assert "ValueError: boom" in one
    for output in (zero, two):
        assert "aborted: rank 1 ended with ValueError: boom" in output


@pytest.mark.processes
def test_a_rank_that_raises_and_whose_connections_close_at_once() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.backends import socket_backend
socket_backend.register()
{RAISES.replace("timeout", "'sockets', timeout")}"""
    (_, zero), (code, one), (_, two) = run_ranks(3, script, program)
    assert code == 1
    assert "ValueError: boom" in one
    for output in (zero, two):
        assert "aborted: rank 1 ended with ValueError: boom" in output


ABORTS = """
import os, sys
import numpy as np
import rankscope as dist

dist.init_process_group(timeout=60)
try:
    dist.barrier()
    if dist.get_rank() == 0:
        dist.abort_process_group(reason="the loss is NaN")
    if dist.get_rank() == 2:
        {early}
    dist.all_reduce(np.ones(3))
except dist.DistAbortedError:
    if dist.get_rank() == 2:
        {ends}
        sys.exit()
dist.rebuild_process_group()
try:
    dist.all_reduce(np.ones(3))
except dist.DistAbortedError as error:
    print(error.reason, error.culprits)
x = np.ones(1)
dist.all_reduce(x, group=dist.shrink_group([2]))
print(x)
dist.destroy_process_group()
"""


def aborts(me: Rank, ends: str, early: str = "pass") -> tuple[int, str]:
    return script(me, ABORTS.format(ends=ends, early=early), meet="ended")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ("os.kill(os.getpid(), 9)", "is gone: killed by SIGKILL"),
        ("raise ValueError('boom')", "ended with ValueError: boom"),
        ("sys.exit(3)", r"its process ended at \S+:\d+ \(exit code 3\)"),
        ("sys.exit()", r"its process ended at \S+:\d+ \(exit code 0\)"),
        (
            "dist.destroy_process_group()",
            r"left group 'default' by destroy_process_group\(\) at \S+:\d+",
        ),
    ],
)
def test_a_rank_that_ends_before_its_rebuild(ends: str, how: str) -> None:
    zero, one, _ = run_ranks(3, aborts, ends)
    assert zero == one
    code, output = zero
    assert code == 0
    assert re.fullmatch(rf"rank 2 .*{how} \(2,\)\n\[2\.\]\n", output)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("early", "late", "how"),
    [
        # It may not have seen the abort yet.
        ("sys.exit()", "", r": its process ended at \S+:\d+ \(exit code 0\)"),
        # It ends the group by another abort, with an op in flight.
        (
            "dist.barrier(async_op=True)",
            "dist.destroy_process_group()",
            r" by destroy_process_group\(\) at \S+:\d+",
        ),
    ],
)
def test_a_rank_that_leaves_as_another_aborts(early: str, late: str, how: str) -> None:
    if late:
        early = f"{early}; {late}; sys.exit()"
    zero, one, _ = run_ranks(3, aborts, late or "pass", early)
    assert zero == one
    assert re.fullmatch(rf"rank 2 left group 'default'{how} \(2,\)\n\[2\.\]\n", zero[1])


HOST_ENDS = """
import os, sys
import numpy as np
import rankscope as dist

dist.init_process_group(timeout=60)
pair = dist.new_group([1, 2])
try:
    dist.barrier()
    if dist.get_rank() == 1:
        dist.abort_process_group(reason="the loss is NaN")
    dist.all_reduce(np.ones(3))
except dist.DistAbortedError:
    if dist.get_rank() == 0:
        sys.exit()
for group in None, pair:
    try:
        dist.rebuild_process_group(group)
        while True:
            dist.all_reduce(np.ones(3), group=group)
    except dist.DistError as error:
        print(error.culprits)
        if isinstance(error, dist.DistAbortedError):
            assert str(error).endswith("; start all ranks again"), error
"""


def host_ends(me: Rank) -> tuple[int, str]:
    return script(me, HOST_ENDS)


@pytest.mark.processes
def test_the_rank_that_served_the_store_is_the_culprit_in_each_group() -> None:
    _, *others = run_ranks(3, host_ends)
    assert others == [(0, "(0,)\n(0,)\n")] * 2


SHRINKS = """
import os, sys
import numpy as np
import rankscope as dist

dist.init_process_group(timeout=60)
try:
    dist.barrier()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), 9)
    dist.all_reduce(np.ones(3))
except dist.DistAbortedError as error:
    excluded = error.culprits
    if dist.get_rank() == 2:
        {ends}
left = dist.shrink_group(excluded)
try:
    dist.all_reduce(np.ones(3), group=left)
except dist.DistAbortedError as error:
    print(error.reason, error.culprits)
    assert "; shrink_group() makes a group" in str(error)
left.rebuild()
try:
    dist.all_reduce(np.ones(3), group=left)
except dist.DistAbortedError as error:
    print(error.culprits)
x = np.ones(1)
dist.all_reduce(x, group=dist.shrink_group([2], left))
print(x)
dist.destroy_process_group()
"""


def shrinks(me: Rank, ends: str) -> tuple[int, str]:
    return script(me, SHRINKS.format(ends=ends), meet="ended")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ("os.kill(os.getpid(), 9)", r"\(.*\) is gone: killed by SIGKILL"),
        ("raise ValueError('boom')", "ended with ValueError: boom"),
        ("sys.exit()", r"left: its process ended at \S+:\d+ \(exit code 0\)"),
        (
            "dist.destroy_process_group(), sys.exit()",
            r"left by destroy_process_group\(\) at \S+:\d+",
        ),
    ],
)
def test_a_rank_that_ends_before_it_makes_a_shrunk_group(ends: str, how: str) -> None:
    zero, one, *_ = run_ranks(4, shrinks, ends)
    assert zero == one
    assert re.fullmatch(
        rf"rank 2 {how} \(2,\)\n\(2,\)\n\[2\.\]\n",
        zero[1],
    )


@pytest.mark.processes
def test_a_rank_that_just_ends_is_no_failure() -> None:
    zero, one, two = run_ranks(3, script, LEAVES)
    assert one == (0, "")
    assert two == (0, "None\n")
    assert zero == (0, "None\n")


def test_a_will_is_executed_unless_withdrawn_or_forestalled() -> None:
    master = TCPStore("127.0.0.1", 0, 4, True, 20, False, key=KEY, reports_deaths=True)

    def other() -> TCPStore:
        return TCPStore(
            "127.0.0.1", master.port, 4, False, 20, False, key=KEY, reports_deaths=True
        )

    dies, withdraws, forestalled = other(), other(), other()
    for name, store in (("a", dies), ("b", withdraws), ("c", forestalled)):
        store.last_will(name, "first")
        store.last_will(name, f"the will of {name}")
    withdraws.withdraw()
    master.set("c", "there already")
    for store in (dies, withdraws, forestalled):
        store.close()
    assert master.get("a", 20) == b"the will of a"
    assert master._server is not None
    wills = master._server._table.wills
    # The master's own connection is left.
    until(lambda: len(wills) == 1)
    assert not master.check(["b"])
    assert master.get("c") == b"there already"
    master.close()


@pytest.mark.parametrize("orderly", [True, False])
def test_the_master_says_goodbye_if_it_goes_in_good_order(orderly: bool) -> None:
    master = TCPStore("127.0.0.1", 0, 2, True, 20, False, key=KEY, reports_deaths=True)
    other = TCPStore(
        "127.0.0.1", master.port, 2, False, 20, False, key=KEY, reports_deaths=True
    )
    told: list[str] = []
    other.watch_loss(told.append)
    if orderly:
        master.withdraw()
    master.close()
    until(lambda: other.lost)
    if not orderly:
        until(lambda: bool(told))
        assert "the process of rank 0 ended" in told[0]
    other.close()
    assert len(told) == (not orderly)


def test_a_store_that_does_not_tell_of_deaths_does_not() -> None:
    master = TCPStore("127.0.0.1", 0, 2, True, 20, False, key=KEY)
    other = TCPStore("127.0.0.1", master.port, 2, False, 20, False, key=KEY)
    other.last_will("a", "b")
    assert master._server is not None
    assert master._server._table.wills == {}
    other.withdraw()
    other.close()
    master.close()


@pytest.mark.processes
def test_one_rank_alone_ends_like_any_program() -> None:
    program = "import rankscope as dist\ndist.init_process_group()"
    assert run_ranks(1, script, program) == [(0, "")]
