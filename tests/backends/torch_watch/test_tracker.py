"""The records that are made of torch's entries, from entries made by hand: no torch."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.torch_watch.calls import Call
from rankscope.backends.torch_watch.torch_record import Progress
from rankscope.backends.torch_watch.tracker import Tracker
from rankscope.backends.work.op_type import OpType


class Group:
    """What a tracker needs of a group of torch."""

    torch_name = "0"
    torch_group = "the group"
    key = GroupKey("default_pg", (0, 1))
    name = "default_pg"
    generation = 0
    born_ns = 0
    timeout = 60.0
    aborted = None

    def __init__(self) -> None:
        self.progress = Progress()


def entry(seq: int, created_ns: int, **fields: Any) -> dict[str, Any]:
    """An all_reduce over gloo that C++ code issued, as torch's recorder has it."""
    values: dict[str, Any] = {
        "record_id": seq,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": created_ns,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
    }
    return {**values, **fields}


def done(seq: int) -> dict[str, dict[str, int]]:
    """Torch's counters when `seq` ops have ended."""
    return {"0": {"last_enqueued_collective": 9, "last_completed_collective": seq}}


def test_an_op_ends_when_the_counters_have_it_and_not_when_it_is_read() -> None:
    group, tracker = Group(), Tracker()
    groups = {group.torch_group: group}
    began = time.time_ns() - 10**9
    tracker.update([entry(1, began), entry(2, began)], (), groups)
    assert tracker.in_flight == 2
    for seq, after in ((0, 100), (1, 200), (1, 300), (2, 400)):
        tracker.note_status(done(seq), began + after)
    read = [entry(seq, began, retired=True) for seq in (1, 2)]
    # What the counters do not have yet ends with the reading.
    tracker.update([*read, entry(3, began, retired=True)], (), groups)
    first, second, third = tracker.records([group])
    assert (first.ended_ns - began, second.ended_ns - began) == (200, 400)
    assert third.ended_ns > began + 400
    assert tracker.in_flight == 0
    assert group.progress.completed is not None


def test_the_last_op_of_a_group_fails_if_no_python_code_issued_it() -> None:
    group, tracker = Group(), Tracker()
    groups = {group.torch_group: group}
    began = time.time_ns() - 10**9
    both = [entry(seq, began + seq, retired=True) for seq in (1, 2)]
    tracker.update(both, (), groups)
    assert tracker.fail_last(group, "Connection closed by peer")
    first, second = tracker.records([group])
    assert (first.state, second.state) == ("completed", "failed")
    assert second.error == "Connection closed by peer"
    assert group.progress.completed is first
    # It is said once.
    assert not tracker.fail_last(group, "again")
    assert second.error == "Connection closed by peer"


def call(began: int, **fields: Any) -> Call:
    """A synchronous all_reduce over gloo that Python code issued: 400 ns of 500."""
    values = {"backend": "gloo", "began_ns": began, "returned_ns": began + 50}
    values |= {"waited_ns": began + 100, "ended_ns": began + 500}
    made = Call(Group.torch_group, OpType.ALL_REDUCE, thread=1)
    for name, value in {**values, **fields}.items():
        setattr(made, name, value)
    return made


def times(
    *ops: tuple[dict[str, Any], Call | None],
) -> tuple[float | None, float | None]:
    """Return the ns that a group tells of ops that are over, as (entry, call)."""
    group, tracker = Group(), Tracker()
    groups = {group.torch_group: group}
    calls = [one for _, one in ops if one is not None]
    tracker.update([one for one, _ in ops], calls, groups)
    assert tracker.in_flight == 0
    told = group.progress.busy.seconds, group.progress.blocked.seconds
    return told[0] and told[0] * 1e9, told[1] and told[1] * 1e9


def test_the_seconds_in_ops_of_gloo_are_those_of_python_calls_that_waited() -> None:
    began = time.time_ns() - 10**9

    def op(seq: int, **fields: Any) -> tuple[dict[str, Any], Call]:
        at = began + 1000 * seq
        fields = {name: value and at + value for name, value in fields.items()}
        return entry(seq, at + 10, retired=True), call(at, **fields)

    known = [op(seq) for seq in range(1, 21)]
    assert times(*known) == pytest.approx((20 * 490, 20 * 400))
    # One that was over before somebody came to wait: nobody was blocked.
    over = op(21, waited_ns=None, ended_ns=300)
    over[1].was_over = True
    assert times(*known, over) == pytest.approx((20 * 490 + 290, 20 * 400))
    # How long it took is known to 290 ns of 290.
    assert times(over) == (None, 0.0)
    # One that was polled for long, and one that C++ code issued.
    polled = op(21, waited_ns=None, ended_ns=900)
    assert times(*known, polled) == (None, None)
    assert times(*known, (entry(21, began, retired=True), None)) == (None, None)


def test_the_seconds_in_ops_of_nccl_are_those_of_its_events() -> None:
    began = time.time_ns() - 10**9
    ended = {"state": "completed", "time_discovered_completed_ns": began + 10**8}
    one = entry(1, began, profiling_name="nccl:all_reduce", **ended)
    one["time_discovered_started_ns"] = began
    assert times(({**one, "duration_ms": 2.5}, None)) == (2500000, None)
    # Without TORCH_NCCL_ENABLE_TIMING.
    assert times((one, None)) == (None, None)


def test_nothing_is_measured_any_more_once_torchs_ring_has_turned_over() -> None:
    group, tracker = Group(), Tracker()
    groups = {group.torch_group: group}
    began = time.time_ns() - 10**9
    tracker.update([entry(1, began, retired=True)], [call(began - 10)], groups)
    assert group.progress.busy.seconds == pytest.approx(490e-9)
    tracker.update([entry(3, began + 5000, retired=True)], (), groups)
    assert group.progress.busy.seconds is group.progress.blocked.seconds is None
