"""A hang for each verdict: what four ranks recorded before it, and what it says.

The page *When it hangs* quotes these verdicts, and its pictures show them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rankscope.backends import OpType, ReduceOp
from rankscope.backends.observe import live_evidence
from rankscope.backends.observe.verdicts import Fault, Verdict
from tests.backends.observe.test_diagnosis import Simulated, look

__all__ = ["SCENES", "Ranks", "scene"]

Ranks = list[Simulated]

#: The time of the pictures: 16:39:17, wherever they are taken.
CLOCK = SimpleNamespace(
    time=lambda: 60_000.0 - 42.8, localtime=time.gmtime, strftime=time.strftime
)


def others(ranks: Ranks, odd: int, op: OpType, **arguments: Any) -> None:
    """Have all ranks but one issue an op in line 5."""
    for one in ranks:
        if one.rank != odd:
            one.issue(op, 5, **arguments)


def missing(ranks: Ranks) -> None:
    others(ranks, 2, OpType.ALL_REDUCE)
    ranks[2].extra["last_cell_exit"] = "left cell 7 with ValueError at line 4"


def busy(ranks: Ranks) -> None:
    for one in ranks:
        if one.rank in (0, 3):
            one.issue(OpType.BARRIER, 5)
        else:
            one.extra["location"] = "cell 7 line 3 (sleep)"


def other_op(ranks: Ranks) -> None:
    others(ranks, 2, OpType.ALL_REDUCE)
    ranks[2].issue(OpType.BROADCAST, 3, peer=0)


def other_order(ranks: Ranks) -> None:
    others(ranks, 2, OpType.ALL_REDUCE)
    others(ranks, 2, OpType.BARRIER)
    ranks[2].issue(OpType.BARRIER, 6)
    ranks[2].issue(OpType.ALL_REDUCE, 5)


def other_argument(op: OpType, usual: Any, **odd: Any) -> Callable[[Ranks], None]:
    def play(ranks: Ranks) -> None:
        others(ranks, 1, op, **usual)
        ranks[1].issue(op, 5, **{**usual, **odd})

    return play


def other_splits(ranks: Ranks) -> None:
    for one in ranks:
        sends = [2, 1, 1, 0] if one.rank == 2 else [1] * 4
        one.issue(OpType.ALL_TO_ALL_SINGLE, 5, shapes=(4, 4), splits=([1] * 4, sends))


def crosswise(ranks: Ranks) -> None:
    for one in ranks:
        if one.rank < 2:
            one.issue(OpType.RECV, 4, peer=1 - one.rank)
        else:
            one.issue(OpType.BARRIER, 6)


def other_tag(ranks: Ranks) -> None:
    ranks[0].issue(OpType.SEND, 3, peer=1, tag=3)
    ranks[1].issue(OpType.RECV, 4, peer=0, tag=5)


def dead(ranks: Ranks) -> None:
    ranks[1].extra["death"] = "rank 1 is dead: killed by SIGKILL"


def silent(ranks: Ranks) -> None:
    others(ranks, 1, OpType.ALL_REDUCE)
    ranks[1].extra["silent_for"] = 7.2


def stuck(ranks: Ranks) -> None:
    for one in ranks:
        one.issue(OpType.ALL_REDUCE, 5, done=one.rank == 0)


def from_any(ranks: Ranks) -> None:
    ranks[1].issue(OpType.RECV, 4)


SCENES: dict[Fault, Callable[[Ranks], None]] = {
    Fault.MISSING_RANKS: missing,
    Fault.RANK_BUSY_ELSEWHERE: busy,
    Fault.OP_MISMATCH: other_op,
    Fault.ORDER_MISMATCH: other_order,
    Fault.DEADLOCK: crosswise,
    Fault.ROOT_MISMATCH: other_argument(OpType.BROADCAST, {"peer": 0}, peer=3),
    Fault.REDUCE_OP_MISMATCH: other_argument(
        OpType.ALL_REDUCE, {"reduce_op": ReduceOp.SUM}, reduce_op=ReduceOp.MAX
    ),
    Fault.DTYPE_MISMATCH: other_argument(OpType.BROADCAST, {"peer": 0}, dtype="f8"),
    Fault.SIZE_MISMATCH: other_argument(OpType.BROADCAST, {"peer": 0}, size=9),
    Fault.SPLIT_MISMATCH: other_splits,
    Fault.TAG_MISMATCH: other_tag,
    Fault.RANK_DEAD: dead,
    Fault.RANK_NOT_RESPONDING: silent,
    Fault.EXECUTION_HANG: stuck,
    Fault.UNDECIDED: from_any,
}


def scene(fault: Fault) -> tuple[Ranks, Verdict]:
    """Return four ranks that hang after an all_reduce together, and the verdict."""
    ranks = [Simulated(rank) for rank in range(4)]
    for one in ranks:
        one.issue(OpType.ALL_REDUCE, 1, done=True)
    SCENES[fault](ranks)
    with mock.patch.object(live_evidence, "time", CLOCK):
        (verdict,) = look(ranks)
    assert verdict.fault is fault
    return ranks, verdict
