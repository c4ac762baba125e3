"""Diagnosis: each verdict from what ranks recorded, and silence when all is well.

The views are made of real recorders: every rank issues its ops over the
`Manual` status objects, in this process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.backends import DistAbortedError, OpType, ReduceOp, Work, WorkState
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.inquiry import Explanation
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.groups.spec import GroupSpec
from rankscope.backends.observe.callers import Callers
from rankscope.backends.observe.diagnosis import (
    completed_unlike,
    diagnose,
    explain,
    failed_last,
)
from rankscope.backends.observe.evidence import SourceLine
from rankscope.backends.observe.live_evidence import live_evidence
from rankscope.backends.observe.verdicts import ConfirmTwice, Fault, RankView, Verdict
from rankscope.backends.work.flight_recorder import GroupCounters, Record

SECOND = 1_000_000_000


def everybody(size: int) -> GroupKey:
    return GroupKey("default", tuple(range(size)))


DEFAULT = everybody(4)


class Simulated:
    """What one rank's recorder holds, made of real records."""

    def __init__(self, rank: int, size: int = 4) -> None:
        self.rank = rank
        key = everybody(size)
        self.status = GroupCounters(key.name, rank, 0, key.ranks, key.id)
        self.entries: list[tuple[Record, Work, str]] = []
        self.extra: dict[str, Any] = {}

    def issue(
        self,
        op: OpType,
        line: int,
        size: int = 4,
        dtype: str = "f4",
        peer: int | None = None,
        reduce_op: ReduceOp | None = None,
        done: bool = False,
        tag: int | None = None,
        splits: tuple[list[int], list[int]] | None = None,
        shapes: Sequence[int] = (),
        called: int = 0,
    ) -> None:
        arrays = [np.empty(one, dtype) for one in shapes or (size,)]
        if op is OpType.BARRIER:
            arrays = []
        record = Record(self.status, op, arrays, peer, 60.0, "", reduce_op, tag, splits)
        callers = [("/job/train.py", called, "step")] if called else []
        record._frames = (record.frames[0], *callers)
        record.number()
        work = Work(op)
        work.bind(record)
        work.mark_started()
        if done:
            work.mark_completed()
        self.entries.append((record, work, f"cell 7 line {line}"))

    def view(self, after: float = 10) -> RankView:
        records = []
        for record, _, source in self.entries:
            entry = record.as_dict()
            entry["frame"]["source"] = source
            records.append(entry)
        now = time.time_ns() + int(after * SECOND)
        return RankView(self.rank, records, now, **self.extra)


@pytest.fixture
def ranks() -> list[Simulated]:
    """Four ranks that have done an all_reduce together."""
    made = [Simulated(rank) for rank in range(4)]
    for one in made:
        one.issue(OpType.ALL_REDUCE, 1, done=True)
    return made


def look(ranks: list[Simulated], stall: float = 5, after: float = 10) -> list[Verdict]:
    views = {one.rank: one.view(after) for one in ranks}
    return diagnose({everybody(len(ranks)): 0}, views, stall)


def only(ranks: list[Simulated]) -> Verdict:
    verdicts = look(ranks)
    assert len(verdicts) == 1
    return verdicts[0]


def test_all_is_well_when_nothing_is_in_flight(ranks: list[Simulated]) -> None:
    assert look(ranks) == []


def test_all_is_well_before_the_stall_threshold(ranks: list[Simulated]) -> None:
    ranks[0].issue(OpType.BARRIER, 2)
    assert look(ranks, stall=5, after=4) == []
    assert len(look(ranks, stall=5, after=6)) == 1


def test_a_missing_rank_is_named_with_how_it_left(ranks: list[Simulated]) -> None:
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    ranks[2].extra["last_cell_exit"] = "left cell 7 with ValueError at line 4"
    verdict = only(ranks)
    assert verdict.fault is Fault.MISSING_RANKS
    assert verdict.culprits == (2,)
    assert verdict.waiting == (0, 1, 3)
    assert (verdict.op, verdict.seq) == ("all_reduce", 2)
    assert str(verdict) == (
        "rank 2 has not entered all_reduce #2 (cell 7 line 5): it left cell 7 with "
        "ValueError at line 4; ranks 0–1, 3 wait in it"
    )


def test_the_op_whose_error_ended_a_cell_is_found_in_the_records(
    ranks: list[Simulated],
) -> None:
    for one in ranks:
        one.issue(OpType.ALL_REDUCE, 5)
        one.entries[-1][1].mark_failed(DistAbortedError("sizes"), WorkState.ABORTED)
    # Rank 1 failed in another group, rank 2 in an op that it had issued before, without
    # waiting, and rank 3 elsewhere.
    for one, name, seq in zip(
        ranks, ("default", "rows", "default"), (2, 2, 1), strict=False
    ):
        one.extra["last_cell_op"] = (name, "all_reduce", seq)
    evidence = live_evidence({DEFAULT: 0}, {one.rank: one.view() for one in ranks})
    (group,) = evidence.groups
    found = [evidence.rank(rank).failed_in for rank in range(4)]
    assert found == [group, None, group, None]
    # One that was refused has no number, and is in no record.
    for name, failed_in in ("default", group), ("rows", None):
        ranks[3].extra["last_cell_op"] = (name, "all_reduce", 0)
        views = {one.rank: one.view() for one in ranks}
        evidence = live_evidence({DEFAULT: 0}, views)
        assert evidence.rank(3).failed_in == failed_in


def explained(ranks: list[Simulated], *silent: int) -> Explanation | None:
    """Return what the ranks learn that ask one another; the `silent` do not answer."""
    spec = GroupSpec("default", range(4), 3, BackendConfig("cpu:tcp"), 3.0)
    answers: dict[int, dict[str, Any] | None] = dict.fromkeys(silent)
    for one in ranks:
        if one.rank not in silent:
            view = one.view()
            answers[one.rank] = {
                "records": list(view.records),
                "now_ns": view.now_ns,
                "groups": {spec.key.id: list(spec.ranks)},
                "location": "train.py:5",
            }
    return explain(spec, 0, answers)


def test_a_rank_that_has_left_is_no_cause_of_an_op_that_does_not_need_it(
    ranks: list[Simulated],
) -> None:
    """It does not answer, and neither does one that is stopped."""
    ranks[3].issue(OpType.RECV, 8, peer=0)
    left = explained(ranks, 1, 2)
    assert left is not None
    assert left.culprits == (0,)
    assert "answered" not in left.text
    stopped = explained(ranks, 0)
    assert stopped is not None
    assert stopped.culprits == (0,)
    assert "rank 0 has not answered since " in stopped.text
    assert stopped.silent
    assert not left.silent
    assert not left.final
    assert not stopped.final


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(
    ("op", "peer"), [(OpType.BARRIER, None), (OpType.BROADCAST, 2), (OpType.REDUCE, 2)]
)
def test_ops_that_never_meet_end_no_more(
    ranks: list[Simulated], op: OpType, peer: int | None, done: bool
) -> None:
    """Also where others are late, do not answer, or have completed their part."""
    for rank in (0, 1):
        ranks[rank].issue(OpType.BROADCAST, 5, peer=0)
    ranks[2].issue(op, 6, peer=peer, done=done)
    found = explained(ranks, 1)
    assert found is not None
    assert found.final
    assert "rank 2 issued" in found.text or "rank 0 issued" in found.text
    assert "answered" not in found.text


def unlike(
    ranks: list[Simulated], one: dict[str, Any], other: dict[str, Any]
) -> Explanation | None:
    """Return what is found where rank 2 issues `other`, the rest `one`; 3 is late."""
    for rank in (0, 1):
        ranks[rank].issue(line=5, **one)
    ranks[2].issue(line=6, **other)
    return explained(ranks)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (OpType.ALL_GATHER, OpType.ALL_GATHER_INTO_TENSOR),
        (OpType.REDUCE_SCATTER, OpType.REDUCE_SCATTER_TENSOR),
        (OpType.ALL_REDUCE, OpType.REDUCE_SCATTER_TENSOR),
        (OpType.ALL_TO_ALL, OpType.ALL_TO_ALL_SINGLE),
    ],
)
def test_an_op_may_meet_what_a_backend_makes_of_another(
    ranks: list[Simulated], one: OpType, other: OpType
) -> None:
    shapes = (4, 4)
    found = unlike(
        ranks, {"op": one, "shapes": shapes}, {"op": other, "shapes": shapes}
    )
    assert found is not None
    assert not found.final


@pytest.mark.parametrize(
    "other",
    [{"dtype": "i4"}, {"dtype": "i2", "size": 8}, {"reduce_op": ReduceOp.MAX}],
)
def test_arguments_of_an_op_are_for_its_messages_to_tell(
    ranks: list[Simulated], other: dict[str, Any]
) -> None:
    usual = {"op": OpType.ALL_REDUCE, "reduce_op": ReduceOp.SUM}
    found = unlike(ranks, usual, usual | other)
    assert found is not None
    assert not found.final


def test_ops_of_other_sizes_end_no_more(ranks: list[Simulated]) -> None:
    """Of large and small arrays the messages differ: none may come that would tell."""
    usual = {"op": OpType.ALL_REDUCE, "reduce_op": ReduceOp.SUM}
    found = unlike(ranks, usual, usual | {"size": 5})
    assert found is not None
    assert found.final
    assert "with 5 elements" in found.text


def test_a_rank_that_is_one_op_behind_or_ahead_is_no_mismatch(
    ranks: list[Simulated],
) -> None:
    ranks[0].issue(OpType.BROADCAST, 5, peer=0, done=True)
    ranks[0].issue(OpType.ALL_REDUCE, 6)
    for rank in (1, 2):
        ranks[rank].issue(OpType.BROADCAST, 5, peer=0)
    found = explained(ranks)
    assert found is None or not found.final


def test_ops_on_two_devices_may_be_in_two_orders(ranks: list[Simulated]) -> None:
    for rank, (first, second) in {
        0: (OpType.ALL_REDUCE, OpType.BARRIER),
        1: (OpType.BARRIER, OpType.ALL_REDUCE),
    }.items():
        for op in (first, second):
            ranks[rank].issue(op, 5)
            record, _, _ = ranks[rank].entries[-1]
            record.backend = "tcp" if op is OpType.BARRIER else "nccl"
    found = explained(ranks)
    assert found is not None
    assert not found.final


def test_a_batch_may_meet_single_ops(ranks: list[Simulated]) -> None:
    for rank in (0, 1):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    ranks[2].issue(OpType.ALL_REDUCE, 6)
    ranks[2].issue(OpType.ALL_REDUCE, 6)
    last, _, _ = ranks[2].entries[-1]
    last.collective_seq_id -= 1
    found = explained(ranks)
    assert found is None or not found.final


def test_a_rank_that_is_busy_is_named_with_where(ranks: list[Simulated]) -> None:
    for rank in (0, 3):
        ranks[rank].issue(OpType.BARRIER, 5)
    ranks[1].extra["location"] = "cell 7 line 3 (sleep)"
    ranks[2].extra["location"] = "cell 7 line 3 (sleep)"
    verdict = only(ranks)
    assert verdict.fault is Fault.RANK_BUSY_ELSEWHERE
    assert verdict.culprits == (1, 2)
    said = "not entered barrier #2 (cell 7 line 5): they are at cell 7 line 3 (sleep)"
    assert said in str(verdict)


def test_the_library_that_a_busy_rank_has_called_is_named(
    ranks: list[Simulated],
) -> None:
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.BARRIER, 5)
    ranks[2].extra["location"] = "cell 7 line 3"
    ranks[2].extra["called"] = "`synchronize` of torch/cuda/__init__.py"
    said = "it is at cell 7 line 3 in `synchronize` of torch/cuda/__init__.py; ranks"
    assert said in str(only(ranks))


def test_an_op_mismatch_names_both_lines(ranks: list[Simulated]) -> None:
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    ranks[2].issue(OpType.BROADCAST, 3, peer=0)
    verdict = only(ranks)
    assert verdict.fault is Fault.OP_MISMATCH
    assert verdict.culprits == (2,)
    assert str(verdict) == (
        "rank 2 issued broadcast #2 (cell 7 line 3) while ranks 0–1, 3 issued "
        "all_reduce #2 (cell 7 line 5)"
    )


def test_the_exception_that_a_rank_handles_is_told(ranks: list[Simulated]) -> None:
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    ranks[2].issue(OpType.BROADCAST, 3, peer=0)
    handled = {"exception": "ValueError: no data", "exception_line": "train.py:9"}
    ranks[2].extra.update(handled)
    ranks[1].extra.update(handled)
    assert str(only(ranks)) == (
        "rank 2 issued broadcast #2 (cell 7 line 3) while ranks 0–1, 3 issued "
        "all_reduce #2 (cell 7 line 5); rank 2 handles ValueError: no data at "
        "train.py:9"
    )


def test_a_rank_that_is_late_since_it_handles_an_exception(
    ranks: list[Simulated],
) -> None:
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    ranks[2].extra.update(
        location="train.py:12",
        exception="ValueError: no data",
        exception_line="train.py:9",
    )
    assert "it handles ValueError: no data at train.py:9" in str(only(ranks))


def test_nothing_that_a_rank_has_named_reaches_a_terminal(
    ranks: list[Simulated],
) -> None:
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    ranks[2].extra.update(location="", exception="E: \x1b]0;title\x07\u202e")
    assert r"handles E: \x1b]0;title\x07\u202e" in str(only(ranks))


def test_ops_in_another_order_are_told_from_other_ops(ranks: list[Simulated]) -> None:
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
        ranks[rank].issue(OpType.BARRIER, 6)
    ranks[2].issue(OpType.BARRIER, 6)
    ranks[2].issue(OpType.ALL_REDUCE, 5)
    verdict = only(ranks)
    assert verdict.fault is Fault.ORDER_MISMATCH
    assert verdict.culprits == (2,)
    assert "same ops in different orders" in str(verdict)


def test_one_op_of_several_sizes_in_another_order(ranks: list[Simulated]) -> None:
    """What the ranks issued is told by its size: the line is that of a loop."""
    for rank in range(4):
        for size in (4, 9) if rank != 2 else (9, 4):
            ranks[rank].issue(OpType.ALL_REDUCE, 5, size=size)
    verdict = only(ranks)
    assert (verdict.fault, verdict.culprits) == (Fault.ORDER_MISMATCH, (2,))
    assert str(verdict) == (
        "rank 2 issued all_reduce #2 (cell 7 line 5) with 9 elements, ranks 0–1 and 3 "
        "with 4 elements; they issue the same ops in different orders"
    )


@pytest.mark.parametrize(
    ("fault", "usual", "odd", "odd_value", "value"),
    [
        (Fault.ROOT_MISMATCH, {"peer": 0}, {"peer": 3}, "root 3", "root 0"),
        (
            Fault.DTYPE_MISMATCH,
            {"peer": 0},
            {"peer": 0, "dtype": "f8"},
            "dtype float64",
            "dtype float32",
        ),
        (
            Fault.SIZE_MISMATCH,
            {"peer": 0},
            {"peer": 0, "size": 9},
            "9 elements",
            "4 elements",
        ),
    ],
)
def test_a_mismatch_of_the_arguments(
    ranks: list[Simulated],
    fault: Fault,
    usual: dict[str, Any],
    odd: dict[str, Any],
    odd_value: str,
    value: str,
) -> None:
    for rank in (0, 2, 3):
        ranks[rank].issue(OpType.BROADCAST, 5, **usual)
    ranks[1].issue(OpType.BROADCAST, 5, **odd)
    verdict = only(ranks)
    assert verdict.fault is fault
    assert verdict.culprits == (1,)
    assert str(verdict) == (
        f"rank 1 issued broadcast #2 (cell 7 line 5) with {odd_value}, "
        f"ranks 0 and 2–3 with {value}"
    )


def test_every_value_of_a_mismatch_is_named(ranks: list[Simulated]) -> None:
    for one in ranks:
        one.issue(OpType.ALL_REDUCE, 3, size=4 + one.rank)
    assert str(only(ranks)) == (
        "rank 0 issued all_reduce #2 (cell 7 line 3) with 4 elements, rank 1 with 5 "
        "elements, rank 2 with 6 elements, rank 3 with 7 elements"
    )


def test_a_mismatch_at_different_lines_names_both(ranks: list[Simulated]) -> None:
    for rank in (0, 2, 3):
        ranks[rank].issue(OpType.BROADCAST, 5, peer=0)
    ranks[1].issue(OpType.BROADCAST, 8, peer=3)
    assert str(only(ranks)) == (
        "rank 1 issued broadcast #2 (cell 7 line 8) with root 3 while ranks 0, 2–3 "
        "issued broadcast #2 (cell 7 line 5) with root 0"
    )


def test_a_mismatch_of_the_reduction(ranks: list[Simulated]) -> None:
    for rank in (0, 2, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5, reduce_op=ReduceOp.SUM)
    ranks[1].issue(OpType.ALL_REDUCE, 5, reduce_op=ReduceOp.MAX)
    verdict = only(ranks)
    assert verdict.fault is Fault.REDUCE_OP_MISMATCH
    assert verdict.culprits == (1,)
    assert str(verdict) == (
        "rank 1 issued all_reduce #2 (cell 7 line 5) with reduce op max, "
        "ranks 0 and 2–3 with reduce op sum"
    )


def test_splits_that_disagree(ranks: list[Simulated]) -> None:
    for one in ranks:
        sends = [2, 1, 1, 0] if one.rank == 2 else [1] * 4
        one.issue(OpType.ALL_TO_ALL_SINGLE, 5, shapes=(4, 4), splits=([1] * 4, sends))
    verdict = only(ranks)
    assert verdict.fault is Fault.SPLIT_MISMATCH
    assert verdict.culprits == (2,)
    assert verdict.waiting == (0, 1, 3)
    assert str(verdict) == (
        "rank 2 sends 2 rows to rank 0, which expects 1; rank 2 sends 0 rows to rank "
        "3, which expects 1, in all_to_all_single #2 (cell 7 line 5)"
    )


def test_splits_that_are_not_given_are_even(ranks: list[Simulated]) -> None:
    for one in ranks:
        sends = [5, 1, 1, 1] if one.rank == 0 else []
        one.issue(OpType.ALL_TO_ALL_SINGLE, 5, shapes=(8, 8), splits=([], sends))
    assert str(only(ranks)) == (
        "rank 0 sends 5 rows to rank 0, which expects 2; rank 0 sends 1 rows to ranks "
        "1–3, which expect 2, in all_to_all_single #2 (cell 7 line 5)"
    )


def test_the_arrays_of_an_all_to_all_are_its_splits(ranks: list[Simulated]) -> None:
    for one in ranks:
        outputs = [3, 3, 3, 7] if one.rank == 1 else [3] * 4
        one.issue(OpType.ALL_TO_ALL, 5, shapes=[3] * 4 + outputs)
    verdict = only(ranks)
    assert verdict.fault is Fault.SPLIT_MISMATCH
    assert verdict.culprits == (1, 3)
    assert "rank 3 sends 3 elements to rank 1, which expects 7, in" in str(verdict)


def test_splits_that_agree_are_no_mismatch(ranks: list[Simulated]) -> None:
    for one in ranks:
        rows = [4 * one.rank, 1, 2, 3]
        received = [[0, 4, 8, 12][i] if one.rank == 0 else one.rank for i in range(4)]
        one.issue(
            OpType.ALL_TO_ALL_SINGLE,
            5,
            shapes=(sum(rows), sum(received)),
            splits=(received, rows),
        )
    assert only(ranks).fault is Fault.EXECUTION_HANG


def test_sizes_that_may_differ_are_no_mismatch(ranks: list[Simulated]) -> None:
    for one in ranks:
        one.issue(OpType.ALL_GATHER, 5, size=3 + one.rank)
    verdict = only(ranks)
    assert verdict.fault is Fault.EXECUTION_HANG


def test_an_execution_hang_is_when_all_have_entered(ranks: list[Simulated]) -> None:
    for one in ranks:
        one.issue(OpType.ALL_REDUCE, 5, done=one.rank == 0)
    verdict = only(ranks)
    assert verdict.fault is Fault.EXECUTION_HANG
    assert str(verdict) == (
        "all ranks have entered all_reduce #2 (cell 7 line 5), and it does not "
        "complete on ranks 1–3; rank 0 has completed it"
    )


def test_a_dead_rank_is_reported_at_once_and_explains_who_waits(
    ranks: list[Simulated],
) -> None:
    ranks[1].extra["death"] = "rank 1 is dead: killed by SIGKILL"
    assert look(ranks)[0].fault is Fault.RANK_DEAD
    assert str(look(ranks)[0]) == "rank 1 is dead: killed by SIGKILL"
    ranks[1].extra["last_seen"] = "after all_reduce #1 (cell 7 line 4)"
    assert str(look(ranks)[0]) == (
        "rank 1 is dead: killed by SIGKILL; "
        "rank 1 was last seen after all_reduce #1 (cell 7 line 4)"
    )
    for rank in (0, 2, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    verdict = only(ranks)
    assert verdict.fault is Fault.RANK_DEAD
    assert verdict.waiting == (0, 2, 3)
    assert "ranks 0, 2–3 wait in all_reduce #2 (cell 7 line 5)" in str(verdict)


def test_a_rank_that_does_not_answer(ranks: list[Simulated]) -> None:
    for rank in (0, 2, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    ranks[1].extra["silent_for"] = silent = 3600.0
    clock = [time.strftime("%H:%M", time.localtime(time.time() - silent))]
    verdict = only(ranks)
    assert verdict.fault is Fault.RANK_NOT_RESPONDING
    assert verdict.culprits == (1,)
    assert not verdict.certain
    # A minute may end meanwhile.
    clock.append(time.strftime("%H:%M", time.localtime(time.time() - silent)))
    assert re.fullmatch(
        rf"rank 1 has not answered since ({'|'.join(clock)}):\d\d: its process is "
        r"stopped or holds the GIL, e\.g\. inside a CUDA call, or its host is out of "
        r"reach; ranks 0, 2–3 wait in all_reduce #2 \(cell 7 line 5\)",
        str(verdict),
    )


def test_a_rank_that_is_known_to_be_stopped(ranks: list[Simulated]) -> None:
    ranks[1].extra |= {
        "silent_for": 2.5,
        "silence": "its process is stopped",
        "process": "engine 3, pid 7 on node",
    }
    verdict = only(ranks)
    said = r"rank 1 \(engine 3, pid 7 on node\) has not answered since [\d:]{8}: "
    assert re.fullmatch(f"{said}its process is stopped", str(verdict))
    # At once, without a second diagnosis.
    assert ConfirmTwice().confirm([verdict]) == [verdict]


def test_the_first_stuck_collective_counts_not_a_later_one(
    ranks: list[Simulated],
) -> None:
    for one in ranks[:3]:
        one.issue(OpType.ALL_REDUCE, 5)
        one.issue(OpType.BARRIER, 6)
    verdict = only(ranks)
    assert verdict.culprits == (3,)
    assert verdict.seq == 2


def test_a_receive_without_its_send(ranks: list[Simulated]) -> None:
    ranks[1].issue(OpType.RECV, 4, peer=0)
    ranks[0].extra["location"] = "cell 7 line 9"
    verdict = only(ranks)
    assert verdict.fault is Fault.RANK_BUSY_ELSEWHERE
    assert verdict.culprits == (0,)
    assert str(verdict) == (
        "rank 0 has not issued the send: it is at cell 7 line 9; "
        "rank 1 waits in recv #1 from rank 0 (cell 7 line 4)"
    )


def test_a_matched_send_that_hangs(ranks: list[Simulated]) -> None:
    ranks[0].issue(OpType.SEND, 3, peer=1)
    ranks[1].issue(OpType.RECV, 4, peer=0)
    verdicts = look(ranks)
    assert {verdict.fault for verdict in verdicts} == {Fault.EXECUTION_HANG}


def test_a_send_that_was_received_hangs_nobody(ranks: list[Simulated]) -> None:
    """Torch's gloo does not say that a send is over before somebody waits for it."""
    ranks[0].issue(OpType.SEND, 3, peer=1)
    ranks[0].issue(OpType.RECV, 4, peer=1)
    ranks[1].issue(OpType.RECV, 5, peer=0, done=True)
    ranks[1].extra["location"] = "cell 7 line 6 (sleep)"
    verdict = only(ranks)
    assert verdict.fault is Fault.RANK_BUSY_ELSEWHERE
    assert verdict.culprits == (1,)
    assert verdict.text == (
        "rank 1 has not issued the send: it is at cell 7 line 6 (sleep); "
        "rank 0 waits in recv #2 from rank 1 (cell 7 line 4)"
    )


def test_a_send_that_was_received_hides_no_collective(ranks: list[Simulated]) -> None:
    ranks[0].issue(OpType.SEND, 3, peer=1)
    ranks[1].issue(OpType.RECV, 5, peer=0, done=True)
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.BARRIER, 6)
    verdict = only(ranks)
    assert verdict.fault is Fault.MISSING_RANKS
    assert verdict.culprits == (2,)
    assert verdict.waiting == (0, 1, 3)


def test_sends_are_received_in_order(ranks: list[Simulated]) -> None:
    """Of three sends with two tags, the last of the first tag is not received."""
    for line, tag in ((3, 1), (4, 2), (5, 1)):
        ranks[0].issue(OpType.SEND, line, peer=1, tag=tag)
    ranks[1].issue(OpType.RECV, 6, peer=0, tag=2, done=True)
    ranks[1].issue(OpType.RECV, 7, peer=0, tag=1, done=True)
    verdict = only(ranks)
    assert verdict.culprits == (1,)
    assert "rank 0 waits in send #3 to rank 1 (cell 7 line 5)" in verdict.text


def test_a_send_and_a_receive_with_other_tags(ranks: list[Simulated]) -> None:
    ranks[0].issue(OpType.SEND, 3, peer=1, tag=3)
    ranks[1].issue(OpType.RECV, 4, peer=0, tag=5)
    verdict = only(ranks)
    assert verdict.fault is Fault.TAG_MISMATCH
    assert verdict.culprits == (0, 1)
    assert str(verdict) == (
        "rank 0 issued send #1 to rank 1 (cell 7 line 3) with tag 3 while rank 1 "
        "issued recv #1 from rank 0 (cell 7 line 4) with tag 5"
    )


def test_a_send_of_another_size_than_its_receive(ranks: list[Simulated]) -> None:
    ranks[0].issue(OpType.SEND, 3, size=9, peer=1, tag=3)
    ranks[1].issue(OpType.RECV, 4, peer=0, tag=3)
    verdict = only(ranks)
    assert verdict.fault is Fault.SIZE_MISMATCH
    assert str(verdict) == (
        "rank 0 issued send #1 to rank 1 (cell 7 line 3) with 9 elements while rank 1 "
        "issued recv #1 from rank 0 (cell 7 line 4) with 4 elements"
    )


@pytest.mark.parametrize(
    ("op", "own", "odd"),
    [(OpType.ALL_GATHER, 0, (4, 4, 4, 9)), (OpType.REDUCE_SCATTER, 4, (9, 9, 9, 9))],
)
def test_parts_may_differ_on_a_rank_and_not_between_ranks(
    ranks: list[Simulated], op: OpType, own: int, odd: tuple[int, ...]
) -> None:
    """Of the arrays that a rank has for all ranks, not of the one that is its own."""
    for one in ranks:
        parts = [4, 4, 4, 7] if one.rank != 2 else [*odd]
        parts.insert(own, 7 if one.rank == 3 else 4)
        one.issue(op, 5, shapes=parts)
    verdict = only(ranks)
    assert (verdict.fault, verdict.culprits) == (Fault.SIZE_MISMATCH, (2,))
    said = "4, 9" if op is OpType.ALL_GATHER else "9"
    assert f"with {said} elements, ranks 0–1 and 3 with 4, 7 elements" in str(verdict)


def test_a_receive_whose_tag_nobody_sends(ranks: list[Simulated]) -> None:
    ranks[0].issue(OpType.SEND, 3, peer=1, tag=1, done=True)
    ranks[1].issue(OpType.RECV, 4, peer=0, tag=1, done=True)
    ranks[1].issue(OpType.RECV, 5, peer=0, tag=2)
    ranks[0].issue(OpType.SEND, 6, peer=1, tag=1, done=True)
    ranks[0].extra["location"] = "cell 7 line 9"
    verdict = only(ranks)
    assert verdict.fault is Fault.RANK_BUSY_ELSEWHERE
    assert "rank 0 has not issued the send: it is at cell 7 line 9; rank 1" in str(
        verdict
    )


def test_a_pipeline_waits_for_its_first_rank() -> None:
    made = [Simulated(rank, 64) for rank in range(64)]
    made[0].extra["location"] = "cell 7 line 2"
    for one in made[1:]:
        one.issue(OpType.RECV, 4, peer=one.rank - 1)
        one.extra["location"] = "cell 7 line 4"
    verdict = only(made)
    assert verdict.fault is Fault.RANK_BUSY_ELSEWHERE
    assert verdict.culprits == (0,)
    assert verdict.waiting == tuple(range(1, 64))
    assert str(verdict).startswith(
        "rank 0 has not issued the send: it is at cell 7 line 2; rank 1 waits in recv"
    )


def test_a_ring_that_waits_for_itself_is_told_in_one_sentence() -> None:
    made = [Simulated(rank, 64) for rank in range(64)]
    for one in made:
        one.issue(OpType.RECV, 4, peer=(one.rank - 1) % 64)
        one.extra["location"] = "cell 7 line 4"
    verdict = only(made)
    assert verdict.culprits == tuple(range(64))
    assert str(verdict) == (
        "ranks 0–63 wait for each other: rank 0 in recv #1 from rank 63 (cell 7 line "
        "4), rank 63 in recv #1 from rank 62 (cell 7 line 4), and so on; "
        "all receive first: one of them must send first"
    )


def test_ranks_beside_a_ring_wait_for_it() -> None:
    """Ranks 0 to 4 are a ring, 5 to 7 wait for rank 0."""
    made = [Simulated(rank, 8) for rank in range(8)]
    for one in made:
        peer = (one.rank - 1) % 5 if one.rank < 5 else 0
        one.issue(OpType.SEND, 4, peer=peer)
        one.extra["location"] = "cell 7 line 4"
    verdict = only(made)
    assert (verdict.culprits, verdict.waiting) == ((0, 1, 2, 3, 4), (5, 6, 7))
    assert str(verdict).startswith("ranks 0–4 wait for each other: rank 0 in send #1")
    assert "one of them must receive first; ranks 5–7 wait in" in str(verdict)


def test_equal_ranks_are_folded(ranks: list[Simulated]) -> None:
    ranks[0].issue(OpType.ALL_REDUCE, 5)
    for rank in (1, 2, 3):
        ranks[rank].extra["location"] = f"cell 7 line {9 - rank // 3}"
    assert str(only(ranks)) == (
        "ranks 1–3 have not entered all_reduce #2 (cell 7 line 5): ranks 1–2 are at "
        "cell 7 line 9; rank 3 is at cell 7 line 8; rank 0 waits in it"
    )
    for rank in (1, 2, 3):
        ranks[rank].extra.clear()
    assert str(only(ranks)).startswith(
        "ranks 1–3 have not entered all_reduce #2 (cell 7 line 5): they run no cell; "
    )


def test_many_dead_ranks_are_folded() -> None:
    made = [Simulated(rank, 64) for rank in range(64)]
    made[0].issue(OpType.ALL_REDUCE, 5)
    for one in made[1:]:
        how = f"killed by SIGKILL (pid {one.rank})"
        one.extra["death"] = f"rank {one.rank} is dead: {how}"
    said = str(only(made))
    assert said.startswith("ranks 1–63 are dead; rank 1 is dead: killed by SIGKILL")
    assert said.count("SIGKILL") == 3


def differs(rank: int) -> Verdict:
    """Return why a library has ended ranks: `rank` has issued an op unlike."""
    text = f"rank {rank} differs"
    return Verdict(Fault.SIZE_MISMATCH, DEFAULT, (rank,), (), "all_reduce", 2, text)


def test_of_a_crash_what_differed_is_the_cause(ranks: list[Simulated]) -> None:
    for one in ranks[:2]:
        one.extra["death"] = f"rank {one.rank} is dead: killed by SIGABRT"
        one.extra["crash_causes"] = (differs(2),)
    for one in ranks[2:]:
        one.issue(OpType.BARRIER, 5)
    found = only(ranks)
    assert (found.fault, found.culprits) == (Fault.SIZE_MISMATCH, (2,))
    assert (found.dead, found.waiting, found.certain) == ((0, 1), (2, 3), True)
    assert str(found) == (
        "rank 2 differs; ranks 0–1 are dead: killed by SIGABRT; "
        "ranks 2–3 wait in barrier #2 (cell 7 line 5)"
    )


def test_a_rank_that_died_of_something_else_is_told_too(ranks: list[Simulated]) -> None:
    for one in ranks[:2]:
        one.extra["death"] = f"rank {one.rank} is dead"
    ranks[1].extra["crash_causes"] = (differs(2),)
    by_fault = {one.fault: one for one in look(ranks)}
    assert by_fault[Fault.SIZE_MISMATCH].dead == (1,)
    assert by_fault[Fault.RANK_DEAD].culprits == (0, 1)


def test_another_generation_is_none_of_our_business(ranks: list[Simulated]) -> None:
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    views = {one.rank: one.view() for one in ranks}
    assert diagnose({DEFAULT: 1}, views, 5) == []
    assert diagnose({GroupKey("other", DEFAULT.ranks): 0}, views, 5) == []


def test_groups_that_share_a_name_and_a_rank_are_told_apart() -> None:
    hangs, works = GroupKey("tp", (0, 1)), GroupKey("tp", (0, 2))
    views = {}
    for rank in range(3):
        records: list[Any] = []
        for key in (hangs, works):
            if rank not in key.ranks:
                continue
            one = Simulated(rank)
            one.status = GroupCounters(key.name, rank, 0, key.ranks, key.id)
            for line in (1, 2):
                if key is works or rank == 0:
                    one.issue(OpType.ALL_REDUCE, line, done=key is works or line == 1)
            records += one.view().records
        views[rank] = RankView(rank, records, time.time_ns() + 10 * SECOND)
    (verdict,) = diagnose({hangs: 0}, views, 5)
    assert verdict.fault is Fault.MISSING_RANKS
    assert (verdict.group, verdict.culprits) == (hangs, (1,))
    assert diagnose({works: 0}, views, 5) == []


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("cell 7 line 3", "it is at cell 7 line 3 in all_reduce #1 of group 'tp'; "),
        (
            "cell 7 line 9",
            "it is at cell 7 line 9, with all_reduce #1 of group 'tp' in flight; ",
        ),
    ],
)
def test_a_rank_in_a_young_op_of_another_group_is_named_with_that_op(
    location: str, words: str
) -> None:
    ranks = [Simulated(rank, 3) for rank in range(3)]
    for rank in (0, 2):
        ranks[rank].issue(OpType.BARRIER, 5)
    other = GroupKey("tp", (1, 2))
    elsewhere = ranks[1] = Simulated(1, 3)
    elsewhere.status = GroupCounters(other.name, 1, 0, other.ranks, other.id)
    elsewhere.issue(OpType.ALL_REDUCE, 3)
    elsewhere.extra["location"] = location
    views = {one.rank: one.view(1 if one.rank == 1 else 10) for one in ranks}
    (verdict,) = diagnose({everybody(3): 0, other: 0}, views, 5)
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_BUSY_ELSEWHERE, (1,))
    assert words in str(verdict)


def test_the_op_of_a_helper_is_told_with_its_caller(ranks: list[Simulated]) -> None:
    """All ops are issued by the same line of a function."""
    ranks[1].issue(OpType.RECV, 7, peer=2, called=24)
    ranks[2].issue(OpType.RECV, 7, peer=1, called=28)
    verdict = only(ranks)
    assert "recv #1 from rank 2 (cell 7 line 7, called at train.py:24)" in str(verdict)
    assert "recv #1 from rank 1 (cell 7 line 7, called at train.py:28)" in str(verdict)
    assert verdict.line == "cell 7 line 7"


def test_a_helper_with_one_caller_is_told_without_it(ranks: list[Simulated]) -> None:
    for one in ranks[1:]:
        one.issue(OpType.ALL_REDUCE, 7, called=24)
    assert "all_reduce #2 (cell 7 line 7): it" in str(only(ranks))
    # From elsewhere it was called earlier.
    for one in ranks:
        one.entries.clear()
        one.status.collective_seq = 0
        one.issue(OpType.ALL_REDUCE, 7, called=3, done=True)
    for one in ranks[1:]:
        one.issue(OpType.ALL_REDUCE, 7, called=24)
    told = "all_reduce #2 (cell 7 line 7, called at train.py:24): it"
    assert told in str(only(ranks))


def test_a_helper_of_another_cell_is_told_with_the_cell_that_runs() -> None:
    """No other op of the helper is known: ops that were fast have no line."""
    line = SourceLine.of("cell 4 line 37")
    assert line is not None
    callers = tuple(map(SourceLine, ("model.py", "cell 6", "cell 8"), (9, 1, 2)))
    line = line._replace(callers=callers)
    assert Callers([line]).named(line) == "cell 4 line 37, called at cell 6 line 1"
    inside = line._replace(callers=callers[:1])
    assert Callers([inside]).named(inside) == "cell 4 line 37"


def test_groups_that_wait_for_each_other_are_told_as_one_cycle() -> None:
    ranks = [Simulated(0, 3), Simulated(1, 3), Simulated(2, 3)]
    keys = [everybody(3), GroupKey("tp", (1, 2)), GroupKey("dp", (0, 2))]
    for rank, key in zip(ranks, keys, strict=True):
        rank.status = GroupCounters(key.name, rank.rank, 0, key.ranks, key.id)
        rank.issue(OpType.ALL_REDUCE, 3 + rank.rank)
        rank.extra["location"] = "cell 7 line 3"
    views = {rank.rank: rank.view() for rank in ranks}
    (verdict,) = diagnose(dict.fromkeys(keys, 0), views, 5)
    assert verdict.fault is Fault.DEADLOCK
    assert verdict.groups == tuple(sorted(keys))
    assert str(verdict) == (
        "ranks 0, 2 wait for each other: "
        "rank 0 in all_reduce #1 of group 'default' (cell 7 line 3) for rank 2, "
        "rank 2 in all_reduce #1 of group 'dp' (cell 7 line 5) for rank 0; "
        "issue the ops in one order on all ranks; "
        "rank 1 waits in all_reduce #1 of group 'tp' (cell 7 line 4) for rank 2"
    )


def test_what_follows_in_other_groups_is_no_verdict_of_its_own() -> None:
    """Rank 3 is late in its pair: rank 2 waits for it, and rank 0 for rank 2."""
    pair, other = GroupKey("tp", (2, 3)), GroupKey("dp", (0, 2))
    ranks = [Simulated(rank) for rank in range(4)]
    for rank, key in ((2, pair), (0, other)):
        ranks[rank].status = GroupCounters(key.name, rank, 0, key.ranks, key.id)
        ranks[rank].issue(OpType.ALL_REDUCE, 3 + rank)
    ranks[3].extra["location"] = "data.py line 77"
    views = {one.rank: one.view() for one in ranks}
    (verdict,) = diagnose({pair: 0, other: 0, DEFAULT: 0}, views, 5)
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_BUSY_ELSEWHERE, (3,))
    assert (verdict.group, verdict.waiting) == (pair, (0, 2))
    assert [verdict.concerns(key) for key in (pair, other, DEFAULT)] == [1, 1, 0]
    assert str(verdict) == (
        "rank 3 has not entered all_reduce #1 of group 'tp' (cell 7 line 5): it is at "
        "data.py:77; rank 2 waits in it; "
        "rank 0 waits in all_reduce #1 of group 'dp' (cell 7 line 3) for rank 2"
    )


def test_a_receive_from_any_rank_blames_nobody_while_a_rank_may_send(
    ranks: list[Simulated],
) -> None:
    ranks[1].issue(OpType.RECV, 4)
    verdict = only(ranks)
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    assert "rank 1 waits in recv #1 from any rank (cell 7 line 4)" in str(verdict)
    # Who waits for rank 1 sends nothing.
    for rank in (0, 2, 3):
        ranks[rank].issue(OpType.BARRIER, 5)
    verdict = only(ranks)
    assert verdict.fault is Fault.DEADLOCK
    assert 1 in verdict.culprits


def note_reduce_op(view: RankView, name: str) -> None:
    record = view.records[-1]
    assert isinstance(record, dict)
    record["reduce_op"] = name


@pytest.mark.parametrize("known", [(0, 1, 2, 3), (0, 1)])
def test_reduce_ops_are_compared_where_both_ranks_know_theirs(
    ranks: list[Simulated], known: tuple[int, ...]
) -> None:
    for rank in ranks:
        rank.issue(OpType.ALL_REDUCE, 5)
    views = {rank.rank: rank.view() for rank in ranks}
    for number in known:
        note_reduce_op(views[number], "max" if number == 1 else "sum")
    (verdict,) = diagnose({DEFAULT: 0}, views, 5)
    assert verdict.fault is Fault.REDUCE_OP_MISMATCH
    # Where no value is the one of most ranks, none of them is known to be wrong.
    assert verdict.culprits == ((1,) if len(known) > 2 else (0, 1))
    assert "with reduce op max" in str(verdict)


def test_a_reduce_op_that_one_rank_alone_knows_is_no_mismatch(
    ranks: list[Simulated],
) -> None:
    for rank in ranks:
        rank.issue(OpType.ALL_REDUCE, 5)
    views = {rank.rank: rank.view() for rank in ranks}
    note_reduce_op(views[1], "max")
    (verdict,) = diagnose({DEFAULT: 0}, views, 5)
    assert verdict.fault is Fault.EXECUTION_HANG


def test_a_rank_nothing_is_known_of_is_not_blamed(ranks: list[Simulated]) -> None:
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    views = {rank: ranks[rank].view() for rank in (0, 1, 3)}
    (verdict,) = diagnose({DEFAULT: 0}, views, 5)
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    assert "nothing is known of rank 2" in str(verdict)
    views[2] = RankView(2, recorded=False, location="train.py:5")
    (verdict,) = diagnose({DEFAULT: 0}, views, 5)
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())


def test_one_look_is_not_enough_except_for_death(ranks: list[Simulated]) -> None:
    for rank in (0, 1, 3):
        ranks[rank].issue(OpType.ALL_REDUCE, 5)
    second = ConfirmTwice()
    assert second.confirm(look(ranks)) == []
    assert [v.culprits for v in second.confirm(look(ranks))] == [(2,)]
    # It came in the meantime: what was seen then and what is seen now differ.
    ranks[2].issue(OpType.ALL_REDUCE, 5)
    assert second.confirm(look(ranks)) == []
    ranks[2].extra["death"] = "killed"
    assert second.confirm(look(ranks))[0].fault is Fault.RANK_DEAD


OPS = st.sampled_from(
    [OpType.ALL_REDUCE, OpType.BROADCAST, OpType.BARRIER, OpType.SEND]
)


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(OPS, st.booleans()), max_size=4), min_size=2, max_size=5
    )
)
def test_any_history_gives_verdicts_that_can_be_told(
    histories: list[list[tuple[OpType, bool]]],
) -> None:
    size = len(histories)
    ranks = [Simulated(rank, size) for rank in range(size)]
    for one, history in zip(ranks, histories, strict=True):
        for op, done in history:
            peer = (one.rank + 1) % len(ranks)
            one.issue(op, 1, peer=None if op is OpType.BARRIER else peer, done=done)
    verdicts = look(ranks)
    stuck = any(not done for history in histories for _, done in history)
    assert bool(verdicts) == stuck
    for verdict in verdicts:
        assert str(verdict)
        assert set(verdict.culprits) <= set(range(len(ranks)))


# -- completed ops that differed ----------------------------------------------------


def test_dtypes_of_completed_ops_that_differed_are_told() -> None:
    ranks = [Simulated(rank, 3) for rank in range(3)]
    group = everybody(3)
    for one in ranks:
        one.issue(OpType.ALL_REDUCE, 1, done=True)
        dtype = "i4" if one.rank == 1 else "f4"
        one.issue(OpType.BROADCAST, 2, dtype=dtype, peer=0, done=True)
        # Not over yet, which a verdict on hangs is for.
        one.issue(OpType.ALL_REDUCE, 3, dtype=dtype)
    views = {one.rank: one.view() for one in ranks}
    (found,) = completed_unlike({group: 0}, views)
    assert found.fault is Fault.DTYPE_MISMATCH
    assert found.culprits == (1,)
    assert (found.op, found.seq) == ("broadcast", 2)
    assert str(found) == (
        "rank 1 issued broadcast #2 (cell 7 line 2) with dtype int32, "
        "ranks 0 and 2 with dtype float32"
    )


def test_the_last_op_of_a_rank_is_told_if_it_failed() -> None:
    ranks = [Simulated(rank, 3) for rank in range(3)]
    group = everybody(3)
    for one in ranks:
        one.issue(OpType.ALL_REDUCE, 1, done=True)
        op = OpType.BROADCAST if one.rank == 1 else OpType.ALL_REDUCE
        one.issue(op, 2, peer=0 if one.rank == 1 else None, done=True)
    views = {one.rank: one.view() for one in ranks}
    assert failed_last({group: 0}, views) == {}
    views = {rank: with_states(view, "failed") for rank, view in views.items()}
    assert failed_last({group: 0}, views) == {
        group: (
            "ranks 0, 2 in all_reduce #2 (cell 7 line 2), "
            "rank 1 in broadcast #2 (cell 7 line 2)"
        )
    }
    assert failed_last({group: 1}, views) == {}
    # What came after it has gone well.
    views = {
        rank: with_states(view, "completed", "failed") for rank, view in views.items()
    }
    assert failed_last({group: 0}, views) == {}


def with_states(view: RankView, *states: str) -> RankView:
    """Return `view` with the `states` of its last records, the last one first."""
    records = [dict(one) for one in view.records]
    for record, state in zip(reversed(records), states, strict=False):
        record["state"] = state
    return replace(view, records=records)


def test_ops_that_are_gone_on_a_rank_tell_nothing() -> None:
    ranks = [Simulated(rank, 2) for rank in range(2)]
    ranks[0].issue(OpType.ALL_REDUCE, 1, dtype="f4", done=True)
    ranks[1].issue(OpType.BROADCAST, 1, dtype="i4", peer=0, done=True)
    ranks[0].issue(OpType.ALL_REDUCE, 2, dtype="f4", done=True)
    views = {one.rank: one.view() for one in ranks}
    assert completed_unlike({everybody(2): 0}, views) == []


def test_an_op_that_its_library_does_not_count_has_no_number() -> None:
    one = Simulated(0, 2)
    one.issue(OpType.BARRIER, 7)
    view = one.view()
    record = view.records[0]
    assert isinstance(record, dict)
    record["op"] = "monitored_barrier"

    def said() -> str:
        views = {0: view, 1: Simulated(1, 2).view()}
        (verdict,) = diagnose({everybody(2): 0}, views, 5)
        return str(verdict)

    assert "not entered monitored_barrier #1 (cell 7 line 7)" in said()
    record["uncounted_id"] = 1
    assert "not entered monitored_barrier (cell 7 line 7)" in said()
