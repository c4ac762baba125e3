"""A rebuild replaces the generation: what belongs to an earlier one ends with it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups import generation
from rankscope.backends.groups.abort_reason import AbortReason
from rankscope.backends.groups.world import world
from tests.backends.manual import Manual


def test_a_failure_of_an_earlier_generation_is_no_failure_of_this_one(
    group: dist.ProcessGroup,
) -> None:
    dist.all_reduce(np.ones(3), async_op=True)
    group.rebuild()
    Manual.made[0].on_failure("late")
    assert group.aborted is None


def test_a_rebuild_waits_for_no_call_that_is_stuck(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, go = threading.Event(), threading.Event()

    def all_reduce(backend: Manual, *_: object) -> dist.Work:
        stuck.set()
        go.wait(30)
        return dist.Work(dist.OpType.ALL_REDUCE)

    monkeypatch.setattr(Manual, "all_reduce", all_reduce)
    errors: list[BaseException] = []

    def issue() -> None:
        try:
            dist.all_reduce(np.ones(3))
        except dist.DistError as error:
            errors.append(error)

    caller = threading.Thread(target=issue)
    caller.start()
    assert stuck.wait(10)
    rebuilding = threading.Thread(target=group.rebuild)
    rebuilding.start()
    rebuilding.join(10)
    done = not rebuilding.is_alive()
    # The new generation works while the call of the old one is stuck.
    work = dist.barrier(async_op=True) if done else None
    in_flight = [*group.status.in_flight.values()]
    go.set()
    caller.join(10)
    rebuilding.join(10)
    assert done
    assert group.generation == 1
    assert in_flight == [work]
    assert "the group was rebuilt" in str(errors[0])


def test_a_backend_that_is_built_during_an_abort_is_stopped(
    group: dist.ProcessGroup,
) -> None:
    def create(store: dist.Store, rank: int, size: int, timeout: float) -> Manual:
        backend = Manual(store, rank, size, timeout)
        group.abort("enough")
        return backend

    dist.Backend.register_backend("manual", create, devices=("cpu", "cuda"))
    with pytest.raises(dist.DistAbortedError, match="all_reduce in group.*enough"):
        dist.all_reduce(np.ones(3))
    assert len(Manual.made[0].aborted) == 1


def test_the_hooks_of_an_abort_are_called_before_ops_end_and_do_not_stop_it(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, seen = threading.Event(), list[object]()
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None

    def fail() -> None:
        seen.append(work.is_completed())
        raise RuntimeError("of the hook")

    group.abort_hooks.update({1: fail, 2: lambda: seen.append(group.aborted)})
    group.abort("enough")
    assert seen == [False, group.aborted]
    # They stay after a rebuild; one that hangs is left alone.
    group.rebuild_hooks[1] = lambda: seen.append(group.generation)
    group.rebuild()
    assert seen.pop() == 1
    group.abort_hooks[3] = lambda: seen.append(go.wait(30))
    monkeypatch.setattr(generation, "HOOK_WAIT", 0.05)
    group.abort("again")
    assert seen[2:] == [True, group.aborted]
    go.set()
    until(lambda: len(seen) == 5)


def test_the_store_forgets_a_generation_once_all_ranks_have_left_it(
    group: dist.ProcessGroup,
) -> None:
    assert world.store is not None
    former, others = group.store, group.size() - 1
    former.set("address", b"of this rank")
    former.add("rebuilt", others - 1)
    group.rebuild()
    until(lambda: former.add("rebuilt", 0) == others)
    assert former.check(["address"])  # a rank has not begun the next one
    former, later = group.store, dist.PrefixStore("of the user", world.store)
    later.set("key", b"")
    former.set("address", b"of this rank")
    former.add("rebuilt", others)
    group.rebuild()
    until(lambda: not former.list_keys())
    assert later.list_keys() == ["key"]


def test_a_death_that_comes_with_an_abort_gives_no_second_reason(
    group: dist.ProcessGroup,
) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    # This rank hears of the death before it hears of the abort of another one.
    peers = group.current._peers
    peers.close()
    group.store.set("abort", AbortReason("of rank 1", "rank 1").to_json())
    died = AbortReason("rank 2 is gone", "the store", culprits=(2,))
    peers._peer_died(died.to_json().encode())
    with pytest.raises(dist.DistAbortedError, match="of rank 1") as caught:
        work.wait()
    assert caught.value.reason == "of rank 1"
    assert group.aborted is not None
    assert (group.aborted.text, group.aborted.by) == ("of rank 1", "rank 1")


@pytest.mark.parametrize("silent", [False, True])
def test_of_ranks_that_abort_at_once_the_first_one_gives_the_reason(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    # This rank has not heard of it yet.
    group.current._peers.close()
    first = AbortReason("of rank 1", "rank 1", culprits=(3,))
    group.store.set("abort", first.to_json())
    answers, set_if_free = threading.Event(), dist.PrefixStore.compare_set
    if silent:
        monkeypatch.setattr(generation, "_AGREE_WAIT", 0.05)

        def late(*args: Any) -> bytes:
            answers.wait(30)
            return set_if_free(*args)

        monkeypatch.setattr(dist.PrefixStore, "compare_set", late)
    group.abort("of this rank")
    with pytest.raises(dist.DistAbortedError) as caught:
        work.wait()
    assert caught.value.reason == ("of this rank" if silent else "of rank 1")
    assert caught.value.culprits == (() if silent else (3,))
    answers.set()
    until(lambda: group.aborted == first)
    with pytest.raises(dist.DistAbortedError, match="of rank 1"):
        dist.barrier()


@pytest.mark.parametrize("lost", [False, True])
def test_an_op_is_not_over_before_an_abort_has_stopped_its_backend(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    # A backend may copy the rest of a message while it is stopped, when a waiter of the
    # same op learns that its connection to another rank is gone.
    array = np.ones(3)
    work = dist.all_reduce(array, async_op=True)
    assert work is not None
    states: list[object] = []

    def abort(backend: Manual, reason: str) -> None:
        made = dist.ConnectionLostError if lost else dist.DistBackendError
        work.mark_failed(made("the connection to rank 1 is gone"))
        states.append(work.is_completed())
        array[:] = 2  # what comes last
        late = dist.Work(dist.OpType.BARRIER)
        late.mark_failed(made("as is this one"))
        assert late.is_completed()  # it is of no group

    monkeypatch.setattr(Manual, "abort", abort)
    work.add_done_callback(lambda work: states.append(float(array[0])))
    group.abort("enough")
    assert states == [False, 2.0]
    with pytest.raises(dist.DistAbortedError, match="enough"):
        work.wait()


def test_an_op_that_is_issued_during_an_abort_is_not_over_before_its_backend(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, copying, aborting = np.ones(3), threading.Event(), threading.Event()

    def abort(backend: Manual, reason: str) -> None:
        aborting.set()
        assert copying.wait(30)
        array[:] = 2

    def all_reduce(backend: Manual, *_: object) -> dist.Work:
        aborter.start()
        assert aborting.wait(30)
        # The op is handed over now; the abort goes on a moment later.
        threading.Timer(0.05, copying.set).start()
        return dist.Work(dist.OpType.ALL_REDUCE)

    aborter = threading.Thread(target=group.abort, args=("enough",))
    dist.barrier(async_op=True)  # which makes the backend
    monkeypatch.setattr(Manual, "abort", abort)
    monkeypatch.setattr(Manual, "all_reduce", all_reduce)
    with pytest.raises(dist.DistAbortedError, match="enough"):
        dist.all_reduce(array)
    assert array[0] == 2
    aborter.join(30)


def test_an_op_that_is_refused_during_an_abort_raises_after_its_end(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller takes the arrays of all ops for its own; those of a hook do not."""
    array, copying, aborting = np.ones(3), threading.Event(), threading.Event()
    seen = []

    def abort(backend: Manual, reason: str) -> None:
        aborting.set()
        assert copying.wait(30)
        array[:] = 2

    def hook() -> None:
        with pytest.raises(dist.DistAbortedError):
            dist.barrier()
        seen.append(aborting.is_set())

    dist.all_reduce(array, async_op=True)
    monkeypatch.setattr(Manual, "abort", abort)
    group.abort_hooks[1] = hook
    aborter = threading.Thread(target=group.abort, args=("enough",))
    aborter.start()
    assert aborting.wait(30)
    threading.Timer(0.05, copying.set).start()
    with pytest.raises(dist.DistAbortedError, match="enough"):
        dist.barrier()
    assert array[0] == 2
    assert seen == [False]
    aborter.join(30)


class Reporting(dist.Work):
    """A Work whose waiter learns how the op has ended, and reports it."""

    def _block(self, timeout: float | None) -> bool:
        self.mark_failed(dist.DistBackendError("the connection to rank 1 is gone"))
        return super()._block(0)


def test_a_waiter_that_reports_a_failure_during_an_abort_waits_for_its_end(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Reporting(dist.OpType.ALL_REDUCE)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait(30)
        except dist.DistError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)

    def abort(backend: Manual, reason: str) -> None:
        waiter.start()
        until(lambda: work.withheld is not None, 30, "the report")

    monkeypatch.setattr(Manual, "all_reduce", lambda *_: work)
    monkeypatch.setattr(Manual, "abort", abort)
    dist.all_reduce(np.ones(3), async_op=True)
    group.abort("enough")
    waiter.join(30)
    assert [type(error) for error in errors] == [dist.DistAbortedError]


def test_a_batch_of_an_earlier_generation_is_refused(group: dist.ProcessGroup) -> None:
    x = np.ones(3)

    def rebuild_inside() -> None:
        with dist.coalescing_manager():
            dist.all_reduce(x, async_op=True)
            group.rebuild()

    with pytest.raises(dist.DistAbortedError, match="the group was rebuilt"):
        rebuild_inside()
    dist.all_reduce(x, async_op=True)
    assert group.status.collective_seq == 1


def test_a_callback_of_an_aborted_work_may_rebuild(group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    work.add_done_callback(lambda _: group.rebuild())
    thread = threading.Thread(target=group.rebuild)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert group.aborted is None
    assert group.generation == 2


def test_the_watches_of_an_ended_generation_are_cancelled(
    group: dist.ProcessGroup,
) -> None:
    first = group.current
    group.rebuild()
    first.store.set("build/cpu", b"1")
    group.store.set("build/cpu", b"1")
    until(lambda: "cpu" in group.current.backends, 10)
    assert first.backends == {}


def test_all_groups_are_aborted_at_once(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may take a second for each."""
    other = dist.new_group([0, 1], group_desc="other")
    assert isinstance(other, dist.ProcessGroup)
    for one in (group, other):
        dist.all_reduce(np.ones(1), group=one, async_op=True)
    together = threading.Barrier(2)
    monkeypatch.setattr(Manual, "abort", lambda self, reason: together.wait(20))
    assert world.abort(None, "enough") == ["default", "other"]
    assert not together.broken
    for one in (group, other):
        assert one.aborted is not None
        assert one.aborted.text == "enough"


def test_the_diagnosis_of_an_abort_stands_apart_from_its_reason(
    group: dist.ProcessGroup,
) -> None:
    why = "rank 1 has not entered all_reduce #1; ranks 0, 2 wait"
    world.abort(None, "nan; stop", by="rank 0", diagnosis=why)
    status = group.summary()
    assert status.diagnosis == why
    assert status.reason is not None
    assert status.reason.startswith("nan; stop (at ")
    assert status.why == str(group.aborted) == f"{why}; {status.reason}"
    with pytest.raises(dist.DistAbortedError) as caught:
        dist.barrier(group)
    assert caught.value.reason == f"{why}; nan; stop"
    assert caught.value.sequence_number is None


def test_a_death_that_is_told_late_leaves_what_was_made_after_it(
    group: dist.ProcessGroup,
) -> None:
    """Made anew or for the first time; what was there before may wait for it."""

    def make(name: str) -> dist.ProcessGroup:
        made = dist.new_group([0, 1], group_desc=name)
        assert isinstance(made, dist.ProcessGroup)
        return made

    before, again = make("before"), make("again")
    group.abort("rank 2 is dead", culprits=[2])
    again.rebuild()
    after, others = make("after"), dist.new_group([0, 2], group_desc="others")
    assert isinstance(others, dist.ProcessGroup)
    ended = world.abort(None, "rank 2 is dead", culprits=[2], dead=[2])
    assert ended == ["default", "before", "others"]
    assert before.aborted
    assert not again.aborted
    assert not after.aborted
    # Of another death nobody knew.
    world.abort(None, "rank 3 is dead", culprits=[3], dead=[3])
    assert after.aborted


def test_a_cell_that_was_sent_after_a_death_may_learn_of_it_late(
    group: dist.ProcessGroup,
) -> None:
    def make(name: str) -> None:
        dist.new_group([0, 1], group_desc=name)

    make("before")
    world.note_dead([2])
    make("after")
    world.note_dead([2])
    ended = world.abort(None, "rank 2 is dead", culprits=[2], dead=[2])
    assert ended == ["default", "before"]
    # It was restarted: another death.
    world.note_dead([])
    make("later")
    ended = world.abort(None, "rank 2 is dead", culprits=[2], dead=[2])
    assert ended == ["default", "before", "after"]
