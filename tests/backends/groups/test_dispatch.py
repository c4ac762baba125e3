"""ProcessGroup and the functional API on one rank, over backends made here.

The backend `manual` does what the test tells it to, when it tells it; so the
dispatch point is seen at work without a communication library.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.world import world
from rankscope.backends.work.flight_recorder import Record, recorder
from rankscope.backends.work.future import collect_all
from rankscope.backends.work.record_fields import UNSEEN
from tests.backends.manual import Manual, OnDevice


def test_backends_are_built_at_the_first_use_of_their_device(
    group: dist.ProcessGroup,
) -> None:
    assert Manual.made == []
    assert group.summary().devices["cpu"] == "manual (not built)"
    dist.all_reduce(np.ones(3), async_op=True)
    dist.all_reduce(np.ones(3), async_op=True)
    assert len(Manual.made) == 1
    assert group.summary().devices == {"cpu": "manual", "cuda": "manual (not built)"}
    dist.all_reduce(OnDevice(2), async_op=True)
    assert len(Manual.made) == 2
    assert [len(backend.works) for backend in Manual.made] == [2, 1]


def test_barrier_goes_to_the_first_device_or_the_one_named(
    group: dist.ProcessGroup,
) -> None:
    dist.barrier(async_op=True)
    dist.barrier(async_op=True, device="cuda")
    assert [len(backend.works) for backend in Manual.made] == [1, 1]


def test_a_device_without_a_backend_is_refused_and_costs_no_number(
    group: dist.ProcessGroup,
) -> None:
    with pytest.raises(ValueError, match="device type 'metal'.*cpu:manual,cuda:manual"):
        dist.all_reduce(OnDevice(8))
    assert group.status.collective_seq == 0


def test_sequence_numbers_count_collectives_and_p2p_apart(
    group: dist.ProcessGroup,
) -> None:
    x = np.ones(3)
    works = [
        dist.all_reduce(x, async_op=True),
        dist.isend(x, dst=1),
        dist.barrier(async_op=True),
        dist.isend(x, dst=2),
    ]
    numbers = []
    for work in works:
        assert work is not None
        record = work.record
        assert isinstance(record, Record)
        numbers.append(
            (record.collective_seq_id, record.p2p_seq_id, record.op_id, record.seq)
        )
    assert numbers == [(1, 0, 1, 1), (1, 1, 2, 1), (2, 1, 3, 2), (2, 2, 4, 2)]


def test_an_empty_array_is_a_completed_work_with_its_own_number(
    group: dist.ProcessGroup,
) -> None:
    work = dist.all_reduce(np.ones(0), async_op=True)
    assert work is not None
    assert work.is_success()
    assert work.sequence_number == 1
    assert dist.all_reduce(np.ones((4, 0))) is None
    assert group.status.collective_seq == 2
    assert Manual.made[0].works == []


def test_the_recorder_keeps_what_and_where(group: dist.ProcessGroup) -> None:
    x = np.ones((2, 3), np.float32)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    entry = recorder.dump()[-1]
    assert entry["state"] == "scheduled"
    assert entry["sizes"] == [[2, 3]]
    assert entry["dtypes"] == ["float32"]
    assert entry["frame"]["file"] == __file__
    assert entry["frame"]["function"] == "test_the_recorder_keeps_what_and_where"
    work.mark_started()
    assert recorder.dump()[-1]["state"] == "started"
    assert group.summary().oldest.state == "started"
    assert group.summary().in_flight == 1
    work.mark_completed()
    entry = recorder.dump()[-1]
    assert entry["state"] == "completed"
    assert 0 < entry["time_created_ns"] <= entry["time_started_ns"]
    assert entry["time_started_ns"] <= entry["time_ended_ns"]
    assert entry["duration_ns"] == entry["time_ended_ns"] - entry["time_started_ns"]
    assert group.summary().in_flight == 0
    assert group.summary().completed.seq == 1


async def _await(work: dist.Work) -> None:
    await work


@pytest.mark.parametrize(
    "wait",
    [
        lambda work: work.wait(),
        lambda work: work.get_future().result(),
        lambda work: asyncio.run(_await(work)),
        lambda work: work.get_future().then(str).then(str).wait(),
        lambda work: collect_all([work.get_future().then(str)]).wait(),
        lambda work: work.is_completed() or work.wait(),
    ],
    ids=["wait", "future", "await", "then", "collect_all", "wait after a look"],
)
def test_the_recorder_keeps_since_when_the_caller_waits(
    group: dist.ProcessGroup, wait: Callable[[dist.Work], object]
) -> None:
    x = np.ones(2)

    def waited() -> tuple[int, int]:
        entry = recorder.dump()[-1]
        return entry["time_waited_ns"], entry["time_created_ns"]

    polled = dist.all_reduce(x, async_op=True)
    assert polled is not None
    polled.mark_completed()
    assert polled.wait()
    assert waited()[0] == 0
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    threading.Timer(0.05, work.mark_completed).start()
    before = time.time_ns()
    wait(work)
    began, created = waited()
    assert created <= before <= began <= recorder.dump()[-1]["time_ended_ns"]

    def end() -> None:
        until(lambda: bool(group.status.in_flight))
        Manual.made[0].works[-1].mark_completed()

    thread = threading.Thread(target=end)
    thread.start()
    dist.barrier()
    thread.join()
    began, created = waited()
    assert began == created
    # Their sums: the first op was over before anybody waited for it.
    polled_entry, *entries = recorder.dump()[-3:]
    blocked = sum(one["time_ended_ns"] - one["time_waited_ns"] for one in entries)
    busy = sum(one["duration_ns"] or 0 for one in (polled_entry, *entries))
    summary = group.summary()
    assert summary.blocked_seconds == pytest.approx(blocked / 1e9)
    assert summary.op_seconds == pytest.approx(busy / 1e9)


def test_completed_ops_and_their_bytes_are_counted_by_kind(
    group: dist.ProcessGroup,
) -> None:
    for size in range(1, 101):
        # More sizes than are kept apart.
        dist.all_reduce(np.ones(size), async_op=True)
    dist.barrier(async_op=True)
    dist.all_gather([np.ones(2) for _ in range(4)], np.ones(2), async_op=True)
    for work in Manual.made[0].works[1:]:
        work.mark_completed()
    Manual.made[0].works[0].mark_failed(RuntimeError("no"))
    assert group.summary().moved == {
        "all_reduce": (99, 8 * sum(range(2, 101))),
        "barrier": (1, 0),
        "all_gather": (1, 8 * 8),
    }


def test_the_wait_for_a_batch_counts_once(group: dist.ProcessGroup) -> None:
    with dist.coalescing_manager(async_ops=True) as batch:
        for _ in range(8):
            dist.all_reduce(np.ones(2))
    threading.Timer(0.05, Manual.made[0].works[-1].mark_completed).start()
    batch.wait()
    entry = recorder.dump()[-1]
    blocked = entry["time_ended_ns"] - entry["time_waited_ns"]
    assert group.summary().blocked_seconds == pytest.approx(blocked / 1e9)


@pytest.mark.parametrize(
    "use",
    [
        lambda work: work.is_completed(),
        lambda work: work.get_future().done(),
        lambda work: work.get_future().then(str).done(),
        lambda work: work.add_done_callback(lambda _: None),
        lambda work: work.get_future().add_done_callback(lambda _: None),
    ],
    ids=["poll", "future", "then", "callback", "callback of the future"],
)
def test_a_wait_that_is_not_seen_is_recorded_as_such(
    group: dist.ProcessGroup, use: Callable[[dist.Work], object]
) -> None:
    work = dist.all_reduce(np.ones(2), async_op=True)
    assert work is not None
    use(work)
    work.mark_completed()
    assert work.wait()
    assert recorder.dump()[-1]["time_waited_ns"] == UNSEEN


def test_the_ring_is_of_fixed_size_and_keeps_no_array(group: dist.ProcessGroup) -> None:
    x = np.ones(0)
    gone = weakref.ref(x)
    for _ in range(len(recorder._ring) + 10):
        dist.all_reduce(x)
    records = recorder.records()
    assert len(records) == len(recorder._ring)
    assert [r.record_id for r in records] == sorted(r.record_id for r in records)
    assert records[-1].collective_seq_id == len(recorder._ring) + 10
    del x
    gc.collect()
    assert gone() is None


def test_a_source_namer_names_lines(group: dist.ProcessGroup) -> None:
    recorder.set_source_namer(lambda file, line: f"cell 7 line {line - line + 3}")
    try:
        work = dist.all_reduce(np.ones(3), async_op=True)
        assert work is not None
        assert "all_reduce #1 of group 'default' on rank 0 (cell 7 line 3)" in repr(
            work
        )
    finally:
        recorder.set_source_namer(None)


def test_listeners_hear_of_every_transition_until_cancelled(
    group: dist.ProcessGroup,
) -> None:
    heard = []
    cancel = recorder.on_change(lambda: heard.append(1))
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    work.mark_started()
    work.mark_completed()
    assert len(heard) == 3
    cancel()
    dist.all_reduce(np.ones(0))
    assert len(heard) == 3


def test_average_is_a_sum_and_a_division(group: dist.ProcessGroup) -> None:
    x = np.array([4.0, 8.0])
    work = dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    inner = Manual.made[0].works[0]
    assert Manual.made[0].calls[0][2] is dist.ReduceOp.SUM
    inner.mark_completed()
    work.wait()
    assert x.tolist() == [1.0, 2.0]
    assert work.sequence_number == 1


def test_an_integer_average_goes_towards_zero(group: dist.ProcessGroup) -> None:
    x = np.array([-7, 7])
    work = dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    Manual.made[0].works[0].mark_completed()
    work.wait()
    assert x.tolist() == [-1, 1]


def test_a_reduction_the_backend_lacks_is_refused_before_anything_is_issued(
    group: dist.ProcessGroup,
) -> None:
    with pytest.raises(
        ValueError, match="'manual' has no ReduceOp.BXOR; it has AVG, MAX, SUM"
    ):
        dist.all_reduce(np.ones(3), op=dist.ReduceOp.BXOR)
    assert group.status.collective_seq == 0


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (dist.ReduceOp.PRODUCT, "no ReduceOp.PRODUCT; it has AVG, MAX, SUM$"),
        (dist.ReduceOp.BOR, "it has AVG, MAX, SUM; of the .* mpi and ucx have it$"),
        (dist.ReduceOp.PREMUL_SUM, "needs a factor, op=make_nccl_premul_sum"),
    ],
)
def test_a_refused_reduction_says_what_to_do(
    group: dist.ProcessGroup, op: dist.ReduceOp, said: str
) -> None:
    with pytest.raises(
        ValueError, match=f"all_reduce.*: backend 'manual' has .*{said}"
    ):
        dist.all_reduce(np.ones(3), op=op)


def test_an_average_is_not_promised_without_a_sum() -> None:
    backend = dist.Backend(0, 1)
    backend.reduce_ops = frozenset({dist.ReduceOp.MAX})
    with pytest.raises(ValueError, match="no ReduceOp.AVG; it has MAX$"):
        backend.check(dist.OpType.REDUCE, np.dtype("f4"), dist.ReduceOp.AVG)


def test_an_op_the_backend_lacks_says_so_and_leaves_the_group_usable(
    group: dist.ProcessGroup,
) -> None:
    with pytest.raises(
        NotImplementedError, match="backend 'manual' does not implement broadcast"
    ):
        dist.broadcast(np.ones(3), src=1)
    assert group.summary().in_flight == 0
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    work.mark_completed()


# -- abort, rebuild, timeouts ----------------------------------------------


def test_abort_fails_what_is_in_flight_and_refuses_what_comes(
    group: dist.ProcessGroup,
) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    dist.abort_process_group(reason="enough")
    assert work.state is dist.WorkState.ABORTED
    with pytest.raises(dist.DistAbortedError, match=r"all_reduce #1.*enough.*rebuild"):
        work.wait()
    with pytest.raises(dist.DistAbortedError, match="barrier in group.*enough"):
        dist.barrier()
    dist.abort_process_group(reason="again")
    assert group.aborted is not None
    assert group.aborted.text == "enough"
    assert len(Manual.made[0].aborted) == 1
    summary = group.summary()
    assert summary.state == "aborted"
    assert "enough" in str(summary.reason)
    assert summary.in_flight == 0


@pytest.mark.parametrize("failed", [True, False])
def test_an_op_whose_backend_an_abort_stops_at_its_start_fails_as_the_abort(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    def all_reduce(self: Manual, tensor: Any, op: dist.ReduceOp) -> dist.Work:
        # As from the thread that reads the other ranks' aborts.
        group.abort("enough")
        work = self._new(dist.OpType.ALL_REDUCE, tensor, op)
        if failed:
            work.mark_failed(dist.DistStoreError("the store was closed"))
        return work

    monkeypatch.setattr(Manual, "all_reduce", all_reduce)
    work = dist.all_reduce(np.ones(3), async_op=True)
    with pytest.raises(dist.DistAbortedError, match="all_reduce #.*enough"):
        work.wait(5)
    assert work.state is dist.WorkState.ABORTED
    assert not group.status.in_flight


def test_an_abort_names_an_op_that_is_just_being_handed_over(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(dist.Work):
        """Its message comes, and is not what it should be, before the op is tied."""

        def bind(self, record: Any, result: Any = None) -> bool:
            group.abort("recv: rank 0 sent 16 bytes where 28 were expected")
            return super().bind(record, result)

    monkeypatch.setattr(Manual, "_new", lambda self, kind, *rest: Ending(kind))
    with pytest.raises(dist.DistAbortedError) as caught:
        dist.all_reduce(np.ones(2))
    assert str(caught.value).startswith("all_reduce #1 of group 'default' on rank 0 (")
    assert caught.value.sequence_number == 1


def test_abort_releases_a_thread_that_waits(group: dist.ProcessGroup) -> None:
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            dist.all_reduce(np.ones(3))
        except dist.DistAbortedError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: group.status.in_flight)
    dist.abort_process_group(reason="free")
    thread.join(10)
    assert "free" in str(caught[0])


def test_rebuild_begins_a_new_generation_with_fresh_backends(
    group: dist.ProcessGroup,
) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    dist.abort_process_group(reason="x")
    assert group.summary().aborts == 1
    dist.rebuild_process_group()
    assert work.state is dist.WorkState.ABORTED
    again = dist.all_reduce(np.ones(3), async_op=True)
    assert again is not None
    assert again.sequence_number == 1
    assert isinstance(again.record, Record)
    assert again.record.generation == 1
    assert len(Manual.made) == 2
    again.mark_completed()
    status = group.summary()
    assert (status.state, status.aborts) == ("ready", 1)


def test_a_destroyed_group_is_not_rebuilt_or_divided(group: dist.ProcessGroup) -> None:
    mine = dist.new_group([0, 1], group_desc="mine")
    dist.abort_process_group(mine, "first")
    dist.destroy_process_group(mine)
    uses: list[Callable[[], object]] = [
        lambda: dist.rebuild_process_group(mine),
        lambda: dist.split_group(mine, [[0]]),
        lambda: dist.shrink_group([1], mine),
        lambda: dist.new_subgroups(1, mine),
    ]
    for use in uses:
        with pytest.raises(
            ValueError, match=r"group 'mine' on rank 0: the group was destroyed; make a"
        ):
            use()
    assert mine.generation == 0


def test_rebuild_of_a_healthy_group_ends_what_was_in_flight(
    group: dist.ProcessGroup,
) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    dist.rebuild_process_group()
    with pytest.raises(dist.DistAbortedError, match="rebuilt"):
        work.wait()
    assert (group.generation, group.summary().aborts) == (1, 0)


def test_a_backend_that_fails_aborts_its_group(group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    Manual.made[0].on_failure("the library broke")
    with pytest.raises(dist.DistAbortedError, match="library broke"):
        work.wait()


def test_an_abort_of_another_rank_comes_through_the_store(
    group: dist.ProcessGroup,
) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    group.store.set("abort", '{"text": "rank 3 gave up", "by": "rank 3", "at": 0}')
    with pytest.raises(dist.DistAbortedError, match="rank 3 gave up.*by rank 3"):
        work.wait(timeout=10)


def test_an_abort_is_published_for_the_other_ranks(group: dist.ProcessGroup) -> None:
    dist.abort_process_group(reason="all of you")
    assert b"all of you" in group.store.get("abort", timeout=10)


def test_the_timeout_fires_from_the_start_of_the_op(group: dist.ProcessGroup) -> None:
    small = dist.new_group([0, 1], timeout=timedelta(seconds=0.4), group_desc="small")
    began = time.monotonic()
    first = dist.all_reduce(np.ones(3), group=small, async_op=True)
    second = dist.all_reduce(np.ones(3), group=small, async_op=True)
    assert first is not None
    assert second is not None
    first.mark_started()
    with pytest.raises(dist.DistTimeoutError, match=r"all_reduce #1.*'small'.*0\.4 s"):
        first.wait()
    assert 0.39 < time.monotonic() - began < 5
    assert first.state is dist.WorkState.TIMED_OUT
    with pytest.raises(dist.DistAbortedError, match="all_reduce #1.*timed out"):
        second.wait(timeout=10)
    assert group.aborted is None


def test_an_op_queued_behind_another_is_not_timed_out_before_it_starts(
    group: dist.ProcessGroup,
) -> None:
    small = dist.new_group([0, 1], timeout=2.0)
    first = dist.all_reduce(np.ones(3), group=small, async_op=True)
    second = dist.all_reduce(np.ones(3), group=small, async_op=True)
    assert first is not None
    assert second is not None
    first.mark_started()
    until(lambda: time.time_ns() - second.scheduled_ns > 0.4e9)
    first.mark_completed()
    second.mark_started()
    with pytest.raises(dist.DistTimeoutError):
        second.wait()
    assert second.started_ns - second.scheduled_ns > 0.4e9
    assert second.completed_ns - second.started_ns > 1.99e9


# -- groups ----------------------------------------------------------------


def test_an_op_may_have_a_timeout_of_its_own(group: dist.ProcessGroup) -> None:
    patient = dist.all_reduce(np.ones(3), async_op=True)
    assert patient is not None
    patient.mark_completed()
    with dist.op_timeout(timedelta(seconds=0.3)), dist.op_timeout(0.2):
        hurried = dist.all_reduce(np.ones(3), async_op=True)
    assert hurried is not None
    hurried.mark_started()
    with pytest.raises(dist.DistTimeoutError, match=r"0\.2 s .*its own timeout"):
        hurried.wait(timeout=10)
    assert group.aborted is not None
    for bad, kind in ((0, ValueError), (-1, ValueError), ("5", TypeError)):
        with pytest.raises(kind, match="op_timeout"), dist.op_timeout(bad):  # type: ignore[arg-type]
            pass


def test_new_groups_are_named_without_talking_to_anybody(
    group: dist.ProcessGroup,
) -> None:
    names = [
        dist.new_group([0, 2]),
        dist.new_group([2, 0]),
        dist.new_group([0, 1], group_desc="tp"),
        dist.new_group(),
    ]
    assert [one.group_desc for one in names] == [
        "ranks 0,2",
        "ranks 0,2 (2)",
        "tp",
        "ranks 0-3",
    ]
    # A description that looks like the name of a second 'tp' does not take its place.
    counted = dist.new_group([0, 1], group_desc="tp (2)")
    assert dist.new_group([0, 1], group_desc="tp").group_desc == "tp (3)"
    assert dist.new_group([0, 1], group_desc="tp (2)").group_desc == "tp (2) (2)"
    assert world.get_group("tp (2)") is counted
    assert world.get_group("tp") is names[2]
    assert dist.get_process_group_ranks(names[0]) == [0, 2]
    assert dist.get_world_size(names[0]) == 2
    assert dist.get_rank(names[0]) == 0
    assert dist.get_group_rank(names[0], 2) == 1
    assert dist.get_global_rank(names[0], 1) == 2
    assert dist.get_backend_config(names[0]) == "cpu:manual,cuda:manual"


@pytest.mark.parametrize("bad", [3, b"tp", "default", "\ud800"])
def test_a_description_is_text_that_no_other_group_has(
    bad: Any, group: dist.ProcessGroup
) -> None:
    kind = ValueError if isinstance(bad, str) else TypeError
    with pytest.raises(kind, match="new_group on rank 0: group_desc="):
        dist.new_group([0, 1], group_desc=bad)
    with pytest.raises(kind, match="split_group on .* rank 0: group_desc="):
        dist.split_group(group, [[0, 1]], group_desc=bad)
    assert world.groups() == [group]


def test_a_shrunken_group(group: dist.ProcessGroup) -> None:
    pair = dist.new_group([0, 2, 3], group_desc="tp", timeout=9)
    waits = dist.all_reduce(np.ones(3), group=pair, async_op=True)
    # Ranks of the group it is made from.
    left = dist.shrink_group([1], pair)
    assert (left.group_desc, left.ranks, left.timeout) == ("tp without 2", [0, 3], 9)
    assert str(left.config) == "cpu:manual,cuda:manual"
    assert not waits.is_completed()
    again = dist.shrink_group([1], pair, dist.SHRINK_ABORT)
    assert again.group_desc == "tp without 2 (2)"
    with pytest.raises(
        dist.DistAbortedError, match="its ranks 0, 3 go on without rank 2"
    ):
        waits.wait()
    assert group.aborted is None


def test_a_group_that_is_split(group: dist.ProcessGroup) -> None:
    three = dist.new_group([0, 2, 3], timeout=9)
    # Ranks of the group that is split, in any order.
    made = dist.split_group(three, [[1], [2, 0]], group_desc="half")
    assert made is not None
    assert (made.group_desc, made.ranks, made.timeout) == ("half", [0, 3], 9)
    assert str(made.config) == "cpu:manual,cuda:manual"
    again = dist.split_group(split_ranks=[[3, 0, 2]], timeout=5)
    assert again is not None
    assert (again.group_desc, again.timeout) == ("ranks 0,2-3 (2)", 5)
    # This rank has no colour.
    assert dist.split_group(three, [[1, 2]]) is None


def test_a_rank_that_is_not_in_the_group_is_told_so_by_every_op(
    group: dist.ProcessGroup,
) -> None:
    outside = dist.new_group([1, 3], group_desc="odd")
    assert isinstance(outside, dist.NonGroupMember)
    assert not outside
    assert dist.get_rank(outside) == -1
    assert dist.get_world_size(outside) == -1
    with pytest.raises(ValueError, match="rank 0 is not in the group"):
        dist.abort_process_group(outside)


def test_disjoint_groups_of_one_name_do_not_share_keys(
    group: dist.ProcessGroup,
) -> None:
    mine = dist.new_group([0, 1], group_desc="pair")
    assert isinstance(mine, dist.ProcessGroup)
    other = dist.ProcessGroup("pair", [2, 3], 2, mine.config, mine._root_store, 1.0)
    mine.store.set("k", b"mine")
    assert not other.store.check(["k"])


def test_a_group_answers_as_torchs_does(group: dist.ProcessGroup) -> None:
    half = dist.new_group([0, 3], group_desc="half")
    assert (half.rank(), half.size()) == (0, 2)
    assert (group.name(), half.name()) == ("manual", "manual")
    assert (group.group_desc, half.group_desc) == ("default", "half")
    assert half.group_name == half.key.id != dist.new_group([0, 3]).group_name
    assert half.bound_device_id is None


def test_groups_of_one_name_are_told_apart_by_their_ranks(
    group: dist.ProcessGroup,
) -> None:
    # Rank 2, which is in the second alone, calls it that too.
    first = dist.new_group([0, 1], group_desc="pair")
    second = dist.new_group([0, 2], group_desc="pair")
    assert first.group_desc == second.group_desc == "pair"
    with pytest.raises(
        ValueError,
        match=r"2 groups called 'pair': "
        r"ranks 0–1 \('pair/\w{8}'\); ranks 0, 2 \('pair/\w{8}'\)",
    ):
        world.get_group("pair")
    with pytest.raises(ValueError, match="2 groups called 'pair'"):
        world.abort(["pair"], "test")
    with pytest.raises(ValueError, match="2 groups called 'pair'"):
        world.rebuild("pair")
    assert world.get_group(first.key.id) is first
    # The second is a group of ranks that this one is not in, or has not made.
    assert world.abort([first.key.id, "other/12345678"], "test") == ["pair"]
    assert (first.aborted is None, second.aborted is None) == (False, True)
    assert world.rebuild(first.key.id) == ["pair"]
    assert (first.generation, second.generation) == (1, 0)
    assert world.abort(None, "test") == ["default", "pair", "pair"]
    dist.destroy_process_group(first)
    assert world.get_group("pair") is second


def test_the_default_group_of_a_block(group: dist.ProcessGroup) -> None:
    dist.new_group([0, 1], group_desc="tp")
    with world.default_group("tp") as tp:
        assert dist.get_world_size() == 2
        assert world.get_group() is tp
    assert dist.get_world_size() == 4


def test_groups_are_exported_and_imported_on_a_fresh_rank(
    group: dist.ProcessGroup, tmp_path: Path
) -> None:
    dist.new_group([0, 1], group_desc="tp", timeout=9)
    dist.new_group([0, 2])
    exported = world.export_groups()
    world.destroy(world.get_group("tp"))
    assert world.import_groups(exported) == ["tp"]
    assert world.get_group("tp").timeout == 9
    assert dist.new_group([0, 2]).group_desc == "ranks 0,2 (2)"


def test_get_backend_warns(group: dist.ProcessGroup) -> None:
    with pytest.deprecated_call():
        assert dist.get_backend() == "manual"


# -- bad input -------------------------------------------------------------

X = np.ones(8)
READ_ONLY = np.ones(8)
READ_ONLY.flags.writeable = False


class NoMemory:
    """As a tensor of torch on the device "meta"."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise ValueError("Unknown device type meta for Dlpack")


BAD_CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "not contiguous": (
        lambda: dist.all_reduce(np.ones((4, 4))[:, 0]),
        ValueError,
        "tensor .*strides.*not C-contiguous.*ascontiguousarray",
    ),
    "read-only": (
        lambda: dist.all_reduce(READ_ONLY),
        ValueError,
        r"tensor is read-only; expected a writable array",
    ),
    "a masked array": (
        lambda: dist.all_reduce(np.ma.masked_array([1.0, 2.0], mask=[True, False])),
        TypeError,
        r"tensor is a MaskedArray, .*pass numpy.asarray\(x\) or x.filled\(value\)",
    ),
    "a matrix": (
        lambda: dist.broadcast(np.asmatrix(np.ones((2, 2))), src=0),
        TypeError,
        r"tensor is a matrix, .*pass numpy.asarray\(x\)$",
    ),
    "an output that is masked": (
        lambda: dist.all_gather([np.ma.ones(8)] * 4, X),
        TypeError,
        r"tensor_list\[0\] is a MaskedArray",
    ),
    "one output for all": (
        lambda: dist.all_gather([np.ones(8)] * 4, X),
        ValueError,
        "all_gather in group 'default' on rank .: output 1 shares memory with output 0",
    ),
    "object dtype": (
        lambda: dist.all_reduce(np.array([None, 1])),
        TypeError,
        "tensor has dtype object",
    ),
    "foreign byte order": (
        lambda: dist.all_reduce(np.ones(3, ">f8")),
        TypeError,
        "native byte order",
    ),
    "a number": (lambda: dist.all_reduce(3.0), TypeError, "tensor is a float"),
    "a list": (lambda: dist.all_reduce([1.0]), TypeError, "tensor is a list"),
    "no ReduceOp": (
        lambda: dist.all_reduce(X, op="sum"),  # type: ignore[arg-type]
        TypeError,
        "op is 'sum'; expected a ReduceOp",
    ),
    "src out of range": (
        lambda: dist.broadcast(X, src=4),
        ValueError,
        "src=4; expected a rank in the group, which has ranks 0–3",
    ),
    "src negative": (lambda: dist.broadcast(X, src=-1), ValueError, "src=-1"),
    "src missing": (lambda: dist.broadcast(X), ValueError, "src is missing"),
    "src twice": (
        lambda: dist.broadcast(X, src=1, group_src=1),
        ValueError,
        "src or group_src, not both",
    ),
    "group_dst out of range": (
        lambda: dist.reduce(X, group_dst=9),
        ValueError,
        "group_dst=9; expected a rank in the group, 0 to 3",
    ),
    "list length": (
        lambda: dist.all_gather([X, X], X),
        ValueError,
        "tensor_list has 2 entries; expected 4",
    ),
    "no list": (
        lambda: dist.all_gather(X, X),  # type: ignore[arg-type]
        TypeError,
        "tensor_list is a ndarray",
    ),
    "shape in a list": (
        lambda: dist.all_gather([np.ones(3), X, X, X], X),
        ValueError,
        r"tensor_list\[0\] .*3 elements; expected 8",
    ),
    "mixed dtypes": (
        lambda: dist.all_gather([X, X, X.astype("f4"), X], X),
        TypeError,
        r"tensor_list\[2\] has dtype float32, tensor has float64",
    ),
    "output size": (
        lambda: dist.all_gather_into_tensor(np.ones(31), X),
        ValueError,
        "output_tensor .*31 elements; expected 32",
    ),
    "gather without a list": (
        lambda: dist.gather(X, dst=0),
        ValueError,
        "gather_list is missing",
    ),
    "gather with a list elsewhere": (
        lambda: dist.gather(X, [X, X, X, X], dst=1),
        ValueError,
        "gather_list is given, but this rank is not the root .rank 1",
    ),
    "scatter sizes": (
        lambda: dist.scatter(X, [X, X, np.ones(7), X], src=0),
        ValueError,
        r"scatter_list\[2\] .*7 elements; expected 8",
    ),
    "reduce_scatter part": (
        lambda: dist.reduce_scatter(X, [np.ones(2)] * 4),
        ValueError,
        r"output .*8 elements; expected 2: the size of input_list\[0\]",
    ),
    "reduce_scatter_tensor size": (
        lambda: dist.reduce_scatter_tensor(X, np.ones(30)),
        ValueError,
        "input .*30 elements; expected 32",
    ),
    "all_to_all_single not divisible": (
        lambda: dist.all_to_all_single(np.ones(7), np.ones(7)),
        ValueError,
        "not divisible by 4 ranks; give input_split_sizes",
    ),
    "all_to_all_single splits": (
        lambda: dist.all_to_all_single(X, X, [2, 2, 2, 2], [1, 1, 1, 1]),
        ValueError,
        r"input_split_sizes=\[1, 1, 1, 1\]; expected 4 sizes .* add up to 8",
    ),
    "mixed devices": (
        lambda: dist.all_gather_into_tensor(OnDevice(2), X),
        ValueError,
        "output_tensor is on 'cuda', the other arrays are on 'cpu'",
    ),
    "send to itself": (
        lambda: dist.isend(X, dst=0),
        ValueError,
        "dst is this rank itself",
    ),
    "isend with a bad tag": (
        lambda: dist.isend(X, dst=1, tag=-1),
        ValueError,
        "^isend in .*tag=-1",
    ),
    "send with a bad tag": (
        lambda: dist.send(X, dst=1, tag=-1),
        ValueError,
        "^send in .*tag=-1",
    ),
    "recv from itself": (
        lambda: dist.recv(X, src=0),
        ValueError,
        "^recv in .*src is this rank itself",
    ),
    "a group that is none": (
        lambda: dist.all_reduce(X, group="tp"),  # type: ignore[arg-type]
        TypeError,
        "group is a str; expected a ProcessGroup",
    ),
    "init twice": (
        lambda: dist.init_process_group("manual"),
        ValueError,
        "there already",
    ),
    "new_group of strangers": (
        lambda: dist.new_group([0, 4]),
        ValueError,
        r"ranks=\[0, 4\]; expected distinct global ranks",
    ),
    "new_group of twins": (lambda: dist.new_group([1, 1]), ValueError, "distinct"),
    "new_group called default": (
        lambda: dist.new_group([0], group_desc="default"),
        ValueError,
        "the name of the default group",
    ),
    "new_group of nobody": (lambda: dist.new_group([]), ValueError, "at least one"),
    "shrink_group by a stranger": (
        lambda: dist.shrink_group([1, 4]),
        ValueError,
        r"ranks_to_exclude=\[1, 4\]; expected distinct ranks of the group",
    ),
    "shrink_group by nobody": (
        lambda: dist.shrink_group([]),
        ValueError,
        "at least one and not all",
    ),
    "shrink_group by all": (
        lambda: dist.shrink_group([0, 1, 2, 3]),
        ValueError,
        "at least one and not all",
    ),
    "shrink_group by itself": (
        lambda: dist.shrink_group([0]),
        ValueError,
        "only the ranks that stay call it",
    ),
    "shrink_group flags": (
        lambda: dist.shrink_group([1], shrink_flags=2),
        ValueError,
        "shrink_flags=2; expected SHRINK_DEFAULT or SHRINK_ABORT",
    ),
    "split_group into nothing": (lambda: dist.split_group(), ValueError, "None; exp"),
    "split_group with an empty list": (
        lambda: dist.split_group(split_ranks=[[0], []]),
        ValueError,
        r"split_ranks=\[\[0\], \[\]\]; expected lists of distinct ranks",
    ),
    "split_group with an overlap": (
        lambda: dist.split_group(split_ranks=[[0, 1], [1, 2]]),
        ValueError,
        "no rank in two",
    ),
    "split_group of strangers": (
        lambda: dist.split_group(split_ranks=[[0, 4]]),
        ValueError,
        "each from 0 to 3",
    ),
    "split_group of ranks in no lists": (
        lambda: dist.split_group(split_ranks=[0, 1]),  # type: ignore[list-item]
        TypeError,
        r"split_ranks\[0\] is 0, a int; expected integers",
    ),
    "the average of truth values": (
        lambda: dist.all_reduce(np.ones(3, bool), dist.ReduceOp.AVG),
        TypeError,
        "all_reduce in group 'default' on rank 0: ReduceOp.AVG is not defined",
    ),
    "a reduction that the backend lacks": (
        lambda: dist.all_reduce(np.ones(3), dist.ReduceOp.BXOR),
        ValueError,
        "all_reduce in group 'default' on rank 0: backend 'manual' has no ReduceOp.BX",
    ),
    "a tensor without memory": (
        lambda: dist.all_reduce(NoMemory()),
        TypeError,
        "tensor .NoMemory. cannot be shared through DLPack: Unknown device type meta",
    ),
    "new_group of a number": (
        lambda: dist.new_group(2),  # type: ignore[arg-type]
        TypeError,
        "ranks is 2, a int; expected integers",
    ),
    "new_group timeout": (
        lambda: dist.new_group([0], timeout=0),
        ValueError,
        "timeout=0; expected more than 0",
    ),
    "a coalesced call of no arrays": (
        lambda: dist.all_reduce_coalesced(3),  # type: ignore[arg-type]
        TypeError,
        "all_reduce_coalesced in .*: tensors is 3, a int; expected a list of arrays",
    ),
    "a coalesced call of two lengths": (
        lambda: dist.all_gather_into_tensor_coalesced([np.ones(4)], []),
        ValueError,
        "input_tensors has 0 entries, output_tensors 1; expected as many",
    ),
    "a coalesced gather of two lengths": (
        lambda: dist.all_gather_coalesced([[np.ones(1)], [], [], []], [np.ones(1)]),
        ValueError,
        r"output_tensor_lists\[1\] has 0 entries, input_tensor_list 1; expected",
    ),
    "objects into a tuple": (
        lambda: dist.all_gather_object((None,) * 4, "x"),  # type: ignore[arg-type]
        TypeError,
        "object_list is a tuple; expected a list of 4 entries",
    ),
    "an object into a tuple": (
        lambda: dist.recv_object_list((None,), 1),  # type: ignore[arg-type]
        TypeError,
        r"object_list is \(None,\); expected a list",
    ),
}


ALIKE = {"a group that is none", "new_group timeout"}


@pytest.mark.parametrize("case", list(BAD_CALLS))
def test_bad_input_is_named_and_costs_nothing(
    group: dist.ProcessGroup, case: str
) -> None:
    call, kind, message = BAD_CALLS[case]
    with pytest.raises(kind, match=message) as caught:
        call()
    # What is wrong on every rank alike, whatever the rank, need not name one.
    assert "rank 0" in str(caught.value) or case in ALIKE
    assert group.status.collective_seq == 0
    assert recorder.records() == []
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    work.mark_completed()
    assert work.sequence_number == 1


def test_a_collective_before_init_says_what_to_call() -> None:
    with pytest.raises(ValueError, match=r"init_process_group\(\) first.*%dist_init"):
        dist.all_reduce(X)
    assert not dist.is_initialized()
    assert dist.group.WORLD is None


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (2, 2), (-1, 2), (0, -1)])
def test_a_bad_rank_or_world_size_is_refused(
    rank: int, size: int, tmp_path: Path
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(ValueError, match=f"rank {rank} of world_size {size}"):
        dist.init_process_group("tcp", store=store, rank=rank, world_size=size)
    store.close()
    assert not dist.is_initialized()


def test_what_a_backend_raises_keeps_its_cause(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = OSError("no route")

    def fail(self: Manual, tensor: Any, op: dist.ReduceOp) -> dist.Work:
        raise RuntimeError("cannot send") from cause

    monkeypatch.setattr(Manual, "all_reduce", fail)
    with pytest.raises(RuntimeError, match="cannot send") as caught:
        dist.all_reduce(np.ones(2))
    assert caught.value.__cause__ is cause
