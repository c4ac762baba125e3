"""The Chrome trace of what ranks recorded, and the clock that all of them share."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rankscope as dist
from rankscope.backends import OpType, WorkState
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.chrome_trace import chrome_trace, estimate_offset
from rankscope.backends.work.flight_recorder import GroupCounters, Record, recorder
from tests.backends.manual import Manual

Event = dict[str, Any]

ORIGIN = 1_800_000_000_000_000_000


def of(trace: dict[str, Any], *phases: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] in phases]


def lane(trace: dict[str, Any], event: Event) -> str:
    """The name of the lane that an event is drawn in."""
    (name,) = (
        one["args"]["name"]
        for one in of(trace, "M")
        if one["name"] == "thread_name"
        and (one["pid"], one["tid"]) == (event["pid"], event["tid"])
    )
    return str(name)


def check(trace: dict[str, Any]) -> None:
    """Hold a trace to what the format asks for."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    named = {(one["pid"], one["tid"]) for one in of(trace, "M")}
    processes = {one["pid"] for one in of(trace, "M") if one["name"] == "process_name"}
    stacks: dict[tuple[int, int], list[float]] = defaultdict(list)
    latest: dict[tuple[int, int], float] = defaultdict(float)
    for event in of(trace, "X", "B", "i"):
        place = event["pid"], event["tid"]
        assert place in named
        assert event["pid"] in processes
        assert event["ts"] >= 0
        if event["ph"] == "i":
            continue
        assert event["ts"] >= latest[place]
        latest[place] = event["ts"]
        # What is open at the same time in one lane lies within each other.
        end = event["ts"] + event.get("dur", float("inf"))
        assert end >= event["ts"]
        stack = stacks[place]
        while stack and stack[-1] <= event["ts"] + 1e-4:
            stack.pop()
        assert not stack or end <= stack[-1] + 1e-4
        stack.append(end)


# -- events --------------------------------------------------------------------


@pytest.fixture
def two_ranks(group: dist.ProcessGroup) -> dict[str, Any]:
    """What a rank recorded, and another one whose clock is 5 s ahead did as well."""
    dist.all_reduce(np.ones(3, np.float32), async_op=True)
    (work,) = Manual.made[0].works
    work.mark_started()
    work.mark_completed()
    dist.isend(np.ones(2), 3)
    Manual.made[0].works[1].mark_completed()
    dist.all_reduce(np.ones(3), async_op=True)
    Manual.made[0].works[2].mark_started()
    dist.barrier(async_op=True)
    mine = recorder.dump()
    other = [dict(record) for record in mine]
    for record in other:
        for key in ("time_created_ns", "time_started_ns", "time_ended_ns"):
            record[key] += 5_000_000_000 * (record[key] > 0)
    return chrome_trace({0: mine, 1: other}, {1: 5_000_000_000})


def test_ranks_are_processes_and_groups_are_lanes(two_ranks: dict[str, Any]) -> None:
    check(two_ranks)
    names = [
        (one["pid"], one["args"]["name"])
        for one in of(two_ranks, "M")
        if one["name"].endswith("_name")
    ]
    assert names == [
        (rank, name)
        for rank in (0, 1)
        for name in (f"rank {rank}", "default", "default p2p", "default queued")
    ]


def test_groups_of_one_name_have_lanes_of_their_own() -> None:
    records = []
    for key in (GroupKey("tp", (0, 1)), GroupKey("tp", (0, 2)), GroupKey("dp", (0,))):
        status = GroupCounters(key.name, 0, 0, key.ranks, key.id)
        one = Record(status, OpType.BARRIER, [], None, 1.0)
        one.number()
        records.append(one.as_dict())
    trace = chrome_trace({0: records[:1], 1: records[1:]}, {})
    check(trace)
    lanes = [lane(trace, event) for event in of(trace, "B")]
    assert lanes == [
        f"{GroupKey('tp', (0, 1)).id} queued",
        "dp queued",
        f"{GroupKey('tp', (0, 2)).id} queued",
    ]


def test_one_clock(two_ranks: dict[str, Any]) -> None:
    mine, other = (
        [(one["name"], one["ts"], one.get("dur")) for one in events]
        for events in (
            [one for one in of(two_ranks, "X", "B") if one["pid"] == rank]
            for rank in (0, 1)
        )
    )
    assert mine == other
    assert two_ranks["otherData"] == {
        "clock_origin_ns": recorder.records()[0].created_ns,
        "clock_offsets_ns": {"0": 0, "1": 5_000_000_000},
    }


def test_ops_reach_from_start_to_end_and_those_in_flight_are_open(
    two_ranks: dict[str, Any],
) -> None:
    found = [
        (lane(two_ranks, one), one["ph"], one["name"], one["cat"])
        for one in of(two_ranks, "X", "B", "E", "i")
        if one["pid"] == 0
    ]
    assert found == [
        ("default", "X", "all_reduce #1", "collective"),
        ("default", "B", "all_reduce #2", "collective"),
        ("default p2p", "X", "send #1", "p2p"),
        ("default queued", "B", "barrier #3", "collective"),
    ]
    event = of(two_ranks, "X")[0]
    record = recorder.records()[0]
    assert event["dur"] == (record.ended_ns - record.started_ns) / 1000
    assert event["ts"] == (record.started_ns - record.created_ns) / 1000
    args = event["args"]
    assert args.pop("source").startswith("test_chrome_trace.py:")
    assert args.pop("timeout_s") == 1800
    assert args == {
        "group": "default",
        "generation": 0,
        "backend": "manual",
        "state": "completed",
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "op_id": 1,
        "sizes": [[3]],
        "dtypes": ["float32"],
        "queued_us": event["ts"],
    }
    assert of(two_ranks, "X")[1]["args"]["peer"] == 3


@pytest.mark.usefixtures("group")
def test_an_abort_is_an_instant_with_its_error() -> None:
    dist.all_reduce(np.ones(3), async_op=True)
    dist.all_reduce(np.ones(3), async_op=True)
    Manual.made[0].works[0].mark_started()
    dist.abort_process_group(reason="enough")
    trace = chrome_trace({0: recorder.dump()}, {})
    check(trace)
    first, second = of(trace, "i")
    assert first["name"] == "aborted: all_reduce #1"
    end = of(trace, "X")[0]["ts"] + of(trace, "X")[0]["dur"]
    assert first["ts"] == pytest.approx(end)
    assert "enough" in first["args"]["error"]
    assert lane(trace, first) == "default"
    # It never began.
    assert lane(trace, second) == "default queued"


@pytest.mark.usefixtures("group")
def test_a_timeout_is_an_instant() -> None:
    dist.all_reduce(np.ones(3), async_op=True)
    error = dist.DistTimeoutError("late")
    Manual.made[0].works[0].mark_failed(error, WorkState.TIMED_OUT)
    (event,) = of(chrome_trace({0: recorder.dump()}, {}), "i")
    assert event["name"] == "timed out: all_reduce #1"
    assert event["args"] == {"error": "late"}


@pytest.mark.usefixtures("group")
def test_a_coalesced_batch_is_one_event() -> None:
    with dist.coalescing_manager(async_ops=True) as manager:
        for size in (1, 2, 3):
            dist.all_reduce(np.ones(size))
        dist.barrier()
    for work in Manual.made[0].works:
        work.mark_completed()
    manager.wait()
    events = of(chrome_trace({0: recorder.dump()}, {}), "X")
    names = [one["name"] for one in events]
    assert names == ["3 coalesced all_reduce #1", "barrier #1"]
    assert events[0]["args"]["op_id"] == [1, 2, 3]
    assert events[0]["args"]["sizes"] == [[[1]], [[2]], [[3]]]


def test_nothing_recorded_is_an_empty_trace() -> None:
    trace = chrome_trace({0: [], 1: []}, {})
    check(trace)
    assert of(trace, "X", "B", "i") == []
    assert len([one for one in of(trace, "M") if one["name"] == "process_name"]) == 2


times = st.integers(0, 50)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([OpType.ALL_REDUCE, OpType.SEND]),
            times,
            times,
            times,
            st.sampled_from([*WorkState]),
        ),
        max_size=12,
    )
)
def test_whatever_overlaps_the_trace_is_valid(
    ops: list[tuple[OpType, int, int, int, WorkState]],
) -> None:
    status = GroupCounters("default", 0, 0, range(2))
    records = []
    now = 0
    for op, after, queued, lasted, state in ops:
        now += after
        record = Record(status, op, [], 1, 60.0)
        record.number()
        record.created_ns, record.state = ORIGIN + now, state
        if state is not WorkState.SCHEDULED:
            record.started_ns = ORIGIN + now + queued
        if state.is_terminal:
            record.ended_ns = ORIGIN + now + queued + lasted
            # Ended in the queue, or its start was not reported.
            record.started_ns *= lasted % 3 > 0
        records.append(record)
    trace = chrome_trace({0: [record.as_dict() for record in records]}, {})
    check(trace)
    assert len(of(trace, "X", "B")) == len(ops)
    assert len(of(trace, "B")) == sum(not r.state.is_terminal for r in records)
    bad = (WorkState.FAILED, WorkState.TIMED_OUT, WorkState.ABORTED)
    assert len(of(trace, "i")) == sum(r.state in bad for r in records)


# -- the clock -----------------------------------------------------------------

delays = st.integers(0, 10**8)
offsets = st.integers(-(10**15), 10**15)


@settings(deadline=None)
@given(
    offsets,
    st.lists(st.tuples(st.integers(0, 10**10), delays, delays), min_size=1),
)
def test_the_offset_is_off_by_half_the_shortest_way_at_most(
    offset: int, ways: list[tuple[int, int, int]]
) -> None:
    samples = [
        (ORIGIN + at, ORIGIN + at + there + offset, ORIGIN + at + there + back)
        for at, there, back in ways
    ]
    found = estimate_offset(samples)
    shortest = min(there + back for _, there, back in ways)
    assert 2 * abs(found - offset) <= shortest + 1
    if all(there == back for _, there, back in ways):
        assert found == offset
    assert estimate_offset([(t0, t + 17, t1) for t0, t, t1 in samples]) == found + 17


@settings(deadline=None)
@given(offsets, st.lists(delays.filter(lambda delay: delay > 20)))
def test_slow_samples_change_nothing(offset: int, slow: list[int]) -> None:
    quick = (ORIGIN, ORIGIN + 3 + offset, ORIGIN + 20)
    late = [(ORIGIN, ORIGIN + delay + offset, ORIGIN + delay) for delay in slow]
    assert estimate_offset([*late, quick, *late]) == estimate_offset([quick])


def test_no_samples_no_offset() -> None:
    with pytest.raises(ValueError, match="at least one"):
        estimate_offset([])


def test_a_sample_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ValueError, match="ends 3 ns before it begins"):
        estimate_offset([(10, 10, 7)])
