"""Why a library has ended a rank: its last status beside the records of the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest

from rankscope.backends.observe.verdicts import Fault, in_one
from rankscope.engines.observe.crash import causes_of_crash
from rankscope.engines.observe.rank_registry import RankRegistry
from rankscope.engines.observe.rank_slots import RankSlot
from rankscope.engines.status import GroupStatus, OpStatus, Summary
from rankscope.engines.wire.answers import Answers

GROUP = GroupStatus("default_pg", "0-1", "cpu:gloo", 0, "ready", None, 60.0)
OP = OpStatus(
    "all_reduce",
    3,
    state="started",
    elapsed=0.2,
    sizes=((6,),),
    dtypes=("float32",),
    source="cell 7 line 3",
)


def record(op: OpStatus, state: str = "failed") -> dict[str, Any]:
    """Return the record of a rank, of the surviving one's an op that failed by now."""
    is_p2p = op.op in ("send", "recv")
    return {
        "group_id": GROUP.key.id,
        "generation": 0,
        "op": op.op,
        "is_p2p": is_p2p,
        "collective_seq_id": 0 if is_p2p else op.seq,
        "p2p_seq_id": op.seq if is_p2p else 0,
        "op_id": -1,
        "backend": "gloo",
        "state": state,
        "peer": op.peer,
        "sizes": [[*one] for one in op.sizes],
        "dtypes": list(op.dtypes),
        "frame": {"source": op.source},
        "time_created_ns": op.seq,
        "time_started_ns": op.seq,
        "time_ended_ns": 0 if state == "started" else 100,
    }


class Registry:
    """Answers with the records of rank 1."""

    def __init__(self, slot: RankSlot, *records: dict[str, Any]) -> None:
        self.slots = [slot, RankSlot(1)]
        self.records = records

    def ask(self, request: Any, ranks: Iterable[int], timeout: float) -> Answers[Any]:
        assert set(ranks) == {1}
        return Answers({1: {"records": [*self.records]}} if self.records else {})


def cause(
    oldest: OpStatus | None,
    *records: dict[str, Any],
    enqueued: OpStatus | None = None,
) -> str:
    group = replace(GROUP, oldest=oldest, enqueued=enqueued)
    slot = RankSlot(0, summary=Summary(groups=(group,)))
    return told(Registry(slot, *records), slot)


def told(registry: Registry, slot: RankSlot) -> str:
    return in_one(causes_of_crash(cast(RankRegistry, registry), slot))[0]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (
            replace(OP, dtypes=("int64",)),
            "rank 0 issued all_reduce #3 (cell 7 line 3) with dtype float32, rank 1 "
            "with dtype int64",
        ),
        (
            replace(OP, sizes=((5,),), source="cell 7 line 9"),
            "rank 0 issued all_reduce #3 (cell 7 line 3) with 6 elements while rank 1 "
            "issued all_reduce #3 (cell 7 line 9) with 5 elements",
        ),
        (OP, ""),
    ],
)
def test_what_differed_is_the_cause(theirs: OpStatus, said: str) -> None:
    assert cause(OP, record(theirs)) == said


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert cause(None, record(OP)) == ""
    # The other rank does not answer.
    assert cause(OP) == ""
    # Of a long list the status has the first ones.
    many = replace(OP, op="all_gather", sizes=((6,),) * 4)
    assert cause(many, record(replace(many, sizes=((5,),) * 9))) == ""


def test_the_last_op_may_be_over_before_the_end() -> None:
    over = replace(OP, state="completed")
    theirs = record(replace(OP, dtypes=("int64",))) | {"state": "completed"}
    said = "rank 0 issued all_reduce #3 (cell 7 line 3) with dtype float32, rank 1 "
    assert cause(None, theirs, enqueued=over) == f"{said}with dtype int64"
    assert cause(None, record(OP) | {"state": "completed"}, enqueued=over) == ""


def test_the_op_that_ended_it_may_not_be_in_its_last_status() -> None:
    """Then its peers may have issued it unlike each other: who is right is not known.

    A status has neither the age of the op before nor its arrays.
    """
    group = replace(GROUP, members="0-2", enqueued=OpStatus("all_reduce", 3))
    slots = [RankSlot(rank, summary=Summary(groups=(group,))) for rank in range(3)]
    theirs = {1: replace(OP, seq=4), 2: replace(OP, seq=4, dtypes=("float64",))}

    class Others(Registry):
        def ask(self, request: Any, ranks: Iterable[int], timeout: float) -> Any:
            return Answers(
                {
                    rank: {"records": [record(op) | {"group_id": group.key.id}]}
                    for rank, op in theirs.items()
                }
            )

    (found,) = causes_of_crash(cast(RankRegistry, Others(slots[0])), slots[0])
    assert (found.fault, found.culprits) == (Fault.DTYPE_MISMATCH, (1, 2))


def test_the_last_records_tell_which_receive_a_message_has_ended() -> None:
    """Of a ring, the rank's own send is over, and so are both sides of the other."""
    send, receive = replace(OP, op="send", seq=1), replace(OP, op="recv", seq=2)
    mine = [replace(one, peer=1) for one in (send, receive)]
    theirs = [replace(one, peer=0, sizes=((9,),)) for one in (send, receive)]
    group = replace(GROUP, oldest=mine[1], enqueued=OpStatus("recv", 2, peer=1))
    slot = RankSlot(0, summary=Summary(groups=(group,)))
    over = Registry(slot, *(record(one, "completed") for one in theirs))
    # By its status, the second receive may be for a message that is to come.
    assert causes_of_crash(cast(RankRegistry, over), slot) == []
    slot.last_records = [record(mine[0], "completed"), record(mine[1], "started")]
    assert told(over, slot) == (
        "rank 0 issued recv #2 from rank 1 (cell 7 line 3) with 6 elements while rank "
        "1 issued send #1 to rank 0 (cell 7 line 3) with 9 elements"
    )


def test_ranks_that_end_together_have_one_cause() -> None:
    """Only the rank that is at fault lives to answer."""
    group = replace(GROUP, members="0-3", oldest=OP)
    odd = record(replace(OP, dtypes=("int64",), source="cell 7 line 9"))
    slots = [RankSlot(rank, summary=Summary(groups=(group,))) for rank in range(4)]

    class Ended(Registry):
        def ask(self, request: Any, ranks: Iterable[int], timeout: float) -> Any:
            return Answers({1: {"records": [odd | {"group_id": group.key.id}]}})

    registry = Ended(slots[0])
    registry.slots = slots
    assert {told(registry, slots[rank]) for rank in (0, 2, 3)} == {
        "rank 1 issued all_reduce #3 (cell 7 line 9) with dtype int64 while ranks 0, "
        "2–3 issued all_reduce #3 (cell 7 line 3) with dtype float32"
    }


def test_the_culprits_of_a_death_are_the_ranks_that_its_reason_blames() -> None:
    group = replace(GROUP, oldest=OP)
    slot = RankSlot(0, summary=Summary(groups=(group,)), death="rank 0 is dead")
    assert slot.culprits == [0]
    # It has killed rank 0, and three ranks would tell which one is at fault.
    registry = Registry(slot, record(replace(OP, dtypes=("int64",))))
    slot.crash_causes = tuple(causes_of_crash(cast(RankRegistry, registry), slot))
    assert "rank 1 with dtype int64" in str(slot.reason)
    assert slot.culprits == [0, 1]
