"""An op that times out: its error says what the ranks themselves know of the cause."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, Ranks, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups import deadlines, inquiry
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.inquiry import Place, locate_with, main_thread_place
from rankscope.backends.groups.spec import GroupSpec
from rankscope.backends.groups.world import DEFAULT, world
from rankscope.backends.stores.process_end import is_stopped
from tests.backends.store_backend import register

pytestmark = pytest.mark.processes

TIMEOUT = 1.5


def join() -> dist.ProcessGroup:
    """Return a group whose ops time out; all ranks have arrived."""
    register()
    dist.init_process_group("cpu:store", timeout=60)
    group = dist.new_group(timeout=TIMEOUT, group_desc="tp")
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier()
    return group


def error_of(group: dist.ProcessGroup, op: str, *args: Any) -> dict[str, Any]:
    """Run an op until its group times out; return what its error says."""
    began = time.monotonic()
    # On a busy machine the op of one rank may begin so late that the timeout of the
    # other rank aborts it: the error is another one then, and says the same.
    with pytest.raises((dist.DistTimeoutError, dist.DistAbortedError)) as caught:
        getattr(dist, op)(np.ones(3), *args, group=group)
    return {
        "text": str(caught.value),
        "culprits": tuple(caught.value.culprits),
        "seconds": time.monotonic() - began,
        "reason": str(group.aborted),
    }


def leave() -> None:
    until(lambda: not asking())
    dist.destroy_process_group()


def asking() -> bool:
    names = [one.name for one in threading.enumerate()]
    return any(name.startswith("rankscope-inquiry") for name in names)


def misses(me: Rank) -> dict[str, Any] | None:
    group = join()
    if me.rank == 2:
        until(lambda: group.aborted)  # rank 2 is here
        leave()
        return None
    said = error_of(group, "all_reduce")
    leave()
    return said


def test_the_rank_that_did_not_enter_is_named_with_its_line() -> None:
    first, second, _ = run_ranks(3, misses)
    line = misses.__code__.co_firstlineno + 3
    for said in (first, second):
        assert re.search(
            r"(the group's timeout\)|the group was aborted): rank 2 has not entered",
            said["text"],
        )
        assert f"it is at test_inquiry.py:{line}" in said["text"]
        assert "ranks 0–1 wait in it" in said["text"]
        assert said["culprits"] == (2,)
        assert "rank 2 has not entered" in said["reason"]
        assert said["text"].endswith("usable again with rebuild_process_group()")


def both_receive(me: Rank) -> dict[str, Any]:
    group = join()
    said = error_of(group, "recv", 1 - me.rank)
    leave()
    return said


def test_two_ranks_that_wait_for_each_other_are_both_named() -> None:
    for said in run_ranks(2, both_receive):
        assert "ranks 0–1 wait for each other: rank 0 in recv #1 from" in said["text"]
        assert "all receive first: one of them must send first" in said["text"]
        assert said["culprits"] == (0, 1)


def stops(me: Rank) -> dict[str, Any]:
    # What was found counts, however late it is on a slow machine.
    inquiry.LONGEST = 30
    group = join()
    if me.rank == 1:
        me.report(os.getpid())
        me.listen()
        leave()
        return {}
    me.listen()
    said = error_of(group, "all_reduce")
    leave()
    return said


def test_a_rank_that_does_not_answer_is_named_in_time() -> None:
    with Ranks(2, stops) as ranks:
        pid = ranks.next_report(1)
        os.kill(pid, signal.SIGSTOP)
        ranks.tell(0, "go")
        until(lambda: ranks.ends_or_reports(0, 30))
        os.kill(pid, signal.SIGCONT)
        ranks.tell(1, "go")
        said, _ = ranks.wait()
    assert "rank 1 has not answered since " in said["text"]
    assert said["culprits"] == (1,)
    assert TIMEOUT <= said["seconds"] < TIMEOUT + 5


def stops_with_the_store(me: Rank) -> None:
    dist.init_process_group("cpu:tcp", timeout=60)
    group = dist.new_group(timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier(group=group)
    me.report(os.getpid())
    me.listen()
    if me.rank == 1:
        me.report(error_of(group, "all_reduce"))
    leave()


def test_rank_0_is_named_that_is_stopped_and_serves_the_store() -> None:
    """Nobody can be asked then."""
    with Ranks(2, stops_with_the_store) as ranks:
        pid = ranks.next_report(0)
        ranks.next_report(1)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: is_stopped(pid))
        ranks.tell(1, "go")
        said = ranks.next_report(1)
        os.kill(pid, signal.SIGCONT)
        ranks.tell(0, "go")
        ranks.wait()
    why = f"does not answer: the process of rank 0 (pid {pid}) is stopped (SIGSTOP, or"
    assert why in said["text"]
    assert f"kill -CONT {pid} continues it" in said["text"]
    assert said["culprits"] == (0,)


def ends_late(me: Rank) -> tuple[float, str]:
    # The question is open until rank 1 answers, however slow the machine is.
    inquiry.ANSWER_WAIT = inquiry.LONGEST = 30
    group = join()
    arrays = [np.ones(3), np.ones(3)]
    if me.rank == 1:
        # During the inquiry, which is void then: this rank answers it afterwards.
        asked, entered = threading.Event(), threading.Event()

        def locate() -> Place:
            asked.set()
            entered.wait(30)
            return Place("")

        locate_with(locate)
        assert asked.wait(30)
    dist.all_reduce(arrays[0], group=group)
    me.meet("the op has ended")
    if me.rank == 1:
        entered.set()
        until(lambda: group.aborted)
        leave()
        return arrays[0][0], ""
    with pytest.raises(dist.DistTimeoutError) as caught:
        dist.all_reduce(arrays[1], group=group)
    leave()
    return arrays[0][0], str(caught.value)


def test_an_op_that_ends_during_the_inquiry_is_no_failure() -> None:
    (total, said), (other, _) = run_ranks(2, ends_late)
    assert total == other == 2
    assert "all_reduce #2" in said


def in_another_order(me: Rank) -> str:
    first = join()
    second = dist.new_group(timeout=60, group_desc="dp")
    assert isinstance(second, dist.ProcessGroup)
    if me.rank == 1:
        dist.all_reduce(np.ones(3), group=second, async_op=True)
        me.report("waits")
        until(lambda: first.aborted)
    else:
        me.listen()
        error_of(first, "all_reduce")
    dist.abort_process_group(second, "the test is over")
    leave()
    return str(first.aborted)


def test_two_groups_that_wait_for_each_other_are_named() -> None:
    with Ranks(2, in_another_order) as ranks:
        ranks.next_report(1)
        ranks.tell(0, "go")
        for said in ranks.wait():
            assert (
                "ranks 0–1 wait for each other: rank 0 in all_reduce #1 of gr" in said
            )


def differs(me: Rank) -> str:
    deadlines.EARLY = 0.2
    dist.init_process_group("cpu:tcp", timeout=3600)
    call: Any = partial(dist.all_reduce, np.ones(3))
    if me.rank == 1:
        dist.broadcast(np.ones(3), 1)  # its part of that is done at once
        call = dist.barrier
    with pytest.raises(dist.DistAbortedError) as caught:
        call()
    # Both that are known to differ, where the third one has not come yet.
    assert caught.value.culprits in ((1,), (0, 1), (1, 2))
    dist.destroy_process_group()
    return str(caught.value)


def test_ops_that_differ_fail_long_before_they_time_out() -> None:
    line = differs.__code__.co_firstlineno + 5
    ends = {
        said.partition("the group was aborted: ")[2] for said in run_ranks(3, differs)
    }
    (end,) = ends
    assert f"rank 1 issued broadcast #1 (test_inquiry.py:{line})" in end
    assert f" issued all_reduce #1 (test_inquiry.py:{line + 3})" in end


def is_late(me: Rank) -> float:
    deadlines.EARLY, inquiry.ANSWER_WAIT = 0.1, 30
    questions: list[int] = []
    answer = inquiry.Inquiry.answer

    def heard(asked: inquiry.Inquiry, number: int) -> None:
        questions.append(number)
        answer(asked, number)

    inquiry.Inquiry.answer = heard  # type: ignore[assignment, method-assign]
    dist.init_process_group("cpu:tcp", timeout=3600)
    x = np.ones(3)
    if me.rank == 1:
        until(lambda: len(questions) > 2)
    dist.all_reduce(x)
    # The store keeps no answer that has been read.
    until(lambda: not asking())
    me.meet("no question is open")
    store = world.get_group(DEFAULT).current.store
    assert not [one for one in store.list_keys() if re.search(r"inquiry/\d+/\d", one)]
    dist.destroy_process_group()
    return x[0]


def test_a_late_rank_answers_and_all_go_on() -> None:
    assert run_ranks(2, is_late) == [2, 2]


def test_a_question_at_the_end_of_python_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(inquiry, "start_thread", refuse)
    asked = object.__new__(inquiry.Inquiry)
    asked._thread_name = "inquiry"
    asked.answer(7)


@pytest.mark.parametrize(("silent", "believed"), [(True, False), (False, True)])
def test_a_rank_that_runs_does_not_believe_that_it_is_silent(
    silent: bool, believed: bool
) -> None:
    """On a busy host its answer comes late, and the first to ask names it."""
    store = dist.HashStore()
    found = inquiry.Explanation("rank 3 has not answered", (3,), silent=silent)
    store.set("inquiry/1", b"0")
    store.set("inquiry/1/found", json.dumps(asdict(found)))
    spec = GroupSpec("default", range(4), 3, BackendConfig("cpu:tcp"), 3.0)
    asked = inquiry.Inquiry(spec, 0, store)
    told = asked._ask_ranks(inquiry.Question(store))
    assert (told is not None) is believed


def test_a_main_thread_that_waits_for_another_is_where_that_one_is() -> None:
    go, found = threading.Event(), list[str]()

    def train() -> None:
        go.wait(20)

    def look() -> None:
        for _ in range(2000):
            found[:] = [main_thread_place().location]
            if str(train.__code__.co_firstlineno + 1) in found[0]:
                break
            time.sleep(0.01)
        go.set()

    trains, looks = threading.Thread(target=train), threading.Thread(target=look)
    trains.start()
    looks.start()
    trains.join()
    looks.join()
    assert found == [f"test_inquiry.py:{train.__code__.co_firstlineno + 1}"]
