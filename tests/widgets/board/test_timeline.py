"""The timeline's data: lanes of groups."""

from __future__ import annotations

from typing import Any

from rankscope.backends import OpType
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.work.flight_recorder import GroupCounters, Record
from rankscope.widgets.board.timeline import timeline
from tests.widgets import simulated


def test_who_has_not_entered_is_shown_after_an_abort_until_it_ended() -> None:
    dumps = {n: simulated.ring(n, 3, count=2, absent=n != 1) for n in range(3)}
    del dumps[1]["records"][2:]
    (missing,) = timeline(dumps, {}, 9_000_000_000)["missing"]
    assert (missing["ranks"], missing["seq"], missing["until"]) == ([1], 3, -1)
    for rank in (0, 2):
        last = dumps[rank]["records"][-1]
        last |= {"state": "aborted", "time_ended_ns": 3_000_000_000 + rank}
    found = timeline(dumps, {}, 9_000_000_000)
    (missing,) = found["missing"]
    assert (missing["ranks"], missing["seq"]) == ([1], 3)
    assert found["origin_ns"] + missing["until"] == 3_000_000_002
    # Of the rebuilt group there is another op: of messages, too.
    sent = {"op": "send", "is_p2p": True, "p2p_seq_id": 1, "peer": 1, "tag": 0}
    again = simulated.record(9, 4_000_000_000, 4_000_000_000, 0, state="started")
    dumps[0]["records"].append({**again, **sent, "generation": 1})
    assert timeline(dumps, {}, 9_000_000_000)["missing"] == []


def test_a_rank_that_nothing_holds_up_comes_first_of_those_that_are_missing() -> None:
    # Rank 0 waits for rank 1, which waits for rank 2; the op of pp ended before.
    ranks = {"dp": [0, 1], "tp": [1, 2], "pp": [0, 2]}
    groups = {name: {"name": name, "ranks": ranks[name]} for name in ranks}

    def found(*works: tuple[int, str, int, int]) -> list[tuple[Any, ...]]:
        dumps: dict[int, Any] = {
            rank: {"rank": rank, "groups": groups, "records": []} for rank in range(3)
        }
        for rank, name, begun, ended in works:
            state = "aborted" if ended else "started"
            record = simulated.record(1, begun, begun, ended, state)
            dumps[rank]["records"].append({**record, "group": name, "group_id": name})
        missing = timeline(dumps, {}, 9_000)["missing"]
        return [(one["ranks"], one["held"], one["why"]) for one in missing]

    held = "all_reduce #1 of group 'tp'"
    late = (0, "dp", 1_000, 0), (1, "tp", 1_100, 0), (2, "pp", 100, 200)
    assert found(*late) == [([2], [], ""), ([0], [], ""), ([1], [1], held)]
    # Crosswise, also once they were aborted: each is held up by the other.
    for one, other in ((0, 0), (5_000, 5_001)):
        crosswise = (0, "dp", 1_000, one), (1, "tp", 1_100, other), (2, "pp", 900, one)
        assert all(held == ranks and why for ranks, held, why in found(*crosswise))
    # Of two that are missing, one waits itself.
    groups["dp"]["ranks"] = [0, 1, 2]
    assert ([1, 2], [1], "") in found(*late[:2])


def test_groups_of_one_name_have_lanes_of_their_own() -> None:
    keys = [GroupKey("tp", (0, 1)), GroupKey("tp", (0, 2))]
    records = []
    for key in keys:
        status = GroupCounters(key.name, 0, 0, key.ranks, key.id)
        for _ in key.ranks:
            record = Record(status, OpType.BARRIER, [], None, 1.0)
            record.number()
            records.append(record.as_dict())
    groups = {key.id: {"name": key.name, "ranks": list(key.ranks)} for key in keys}
    dump = {"rank": 0, "groups": groups, "records": records}
    found = timeline({0: dump}, {}, 5)
    assert found["groups"] == [
        {"name": "tp", "ranks": list(key.ranks), "over": False} for key in keys
    ]
    assert [(one["group"], len(one["works"])) for one in found["lanes"]] == [
        *((0, 2), (1, 2)),
        # The other ranks are dead: they keep their rows.
        *((0, 0), (1, 0)),
    ]


def test_the_lanes_of_a_restarted_rank_keep_their_order() -> None:
    groups = {
        "default": {"name": "default", "ranks": [0, 1, 2]},
        "tp": {"name": "tp", "ranks": [0, 1]},
        "dp": {"name": "dp", "ranks": [0, 2]},
    }
    dump = {"rank": 0, "groups": groups, "records": []}
    after = {**dump, "groups": dict(reversed(groups.items()))}
    for one in (dump, after):
        found = timeline({0: one}, {}, 5)
        names = [found["groups"][lane["group"]]["name"] for lane in found["lanes"]]
        assert names[:3] == ["default", "tp", "dp"]


def test_a_group_is_over_once_it_was_rebuilt_and_others_go_on() -> None:
    names = {"default": (0, 1), "dp": (0, 1), "gone": (0, 1)}
    keys = {name: GroupKey(name, ranks) for name, ranks in names.items()}

    def over(*ops: tuple[str, int], generations: dict[GroupKey, int]) -> list[str]:
        records = [
            simulated.record(seq, seq, seq, seq + 1)
            | {"group": name, "group_id": name, "generation": generation}
            for seq, (name, generation) in enumerate(ops, 1)
        ]
        groups = {name: {"name": name, "ranks": [0, 1]} for name in names}
        dump = {"rank": 0, "groups": groups, "records": records}
        found = timeline({0: dump}, {}, 99, generations=generations)
        return [one["name"] for one in found["groups"] if one["over"]]

    rebuilt = {keys["default"]: 1, keys["dp"]: 1}
    hung = (("default", 0), ("dp", 0), ("gone", 0))
    # The hang stays in sight until there is something else.
    assert over(*hung, generations=rebuilt) == []
    assert over(*hung, ("default", 1), generations=rebuilt) == ["dp", "gone"]
    assert over(*hung, ("default", 1), ("dp", 1), generations=rebuilt) == ["gone"]
    assert over(*hung, ("default", 1), generations={}) == []


class TestMessages:
    """Arrows from sends to their receives: never one that may be wrong."""

    @staticmethod
    def _dump(rank: int, *ops: tuple[str, int, int, bool], **fields: Any) -> Any:
        """The dump of a rank with sends and receives: op, peer, tag, whether done."""
        records = [
            {
                **simulated.record(
                    0, seq * 1000, seq * 1000, seq * 1000 + 500 if done else 0
                ),
                **{"op": op, "is_p2p": True, "p2p_seq_id": seq, "peer": peer},
                **{"tag": tag, "state": "completed" if done else "started"},
                **fields,
            }
            for seq, (op, peer, tag, done) in enumerate(ops, 1)
        ]
        groups = {"default": {"name": "default", "ranks": [4, 5, 6]}}
        return {"rank": rank, "groups": groups, "records": records}

    @staticmethod
    def _arrows(*dumps: Any) -> list[tuple[str, str]]:
        """From which op to which one: ``("4 send → 5 tag 0 #1", "5 not issued")``."""
        by_rank = {dump["rank"]: dump for dump in dumps}
        found = timeline(by_rank, {}, 9_000_000_000)

        def side(lane: int, place: int) -> str:
            lane_of = found["lanes"][lane]
            if place < 0:
                return f"{lane_of['rank']} not issued"
            work = lane_of["works"][place]
            return f"{lane_of['rank']} {found['words'][work[4]]} #{work[5]}"

        return sorted((side(*one[:2]), side(*one[2:])) for one in found["messages"])

    def test_they_are_counted_per_pair_and_tag(self) -> None:
        sender = self._dump(
            4, ("send", 1, 0, True), ("send", 1, 7, True), ("send", 1, 0, True)
        )
        receiver = self._dump(
            5, ("recv", 0, 7, True), ("recv", 0, 0, True), ("recv", 0, 0, True)
        )
        assert self._arrows(sender, receiver) == [
            ("4 send → 5 tag 0 #1", "5 recv ← 4 tag 0 #2"),
            ("4 send → 5 tag 0 #3", "5 recv ← 4 tag 0 #3"),
            ("4 send → 5 tag 7 #2", "5 recv ← 4 tag 7 #1"),
        ]

    def test_nccl_has_no_tags(self) -> None:
        sender = self._dump(4, ("send", 1, 3, True), backend="nccl")
        receiver = self._dump(5, ("recv", 0, 0, True), backend="nccl")
        assert self._arrows(sender, receiver) == [("4 send → 5 #1", "5 recv ← 4 #1")]

    def test_an_op_without_its_other_side_ends_where_nobody_is(self) -> None:
        sender = self._dump(4, ("send", 1, 0, False))
        receiver = self._dump(5, ("recv", 2, 0, False))
        third = self._dump(6)
        assert self._arrows(sender, receiver, third) == [
            ("4 send → 5 tag 0 #1", "5 not issued"),
            ("6 not issued", "5 recv ← 6 tag 0 #1"),
        ]

    def test_an_op_of_this_moment_is_not_missed_yet(self) -> None:
        sender = self._dump(4, ("send", 1, 0, False), time_created_ns=8_500_000_000)
        assert self._arrows(sender, self._dump(5)) == []

    def test_nothing_is_said_where_records_are_lost(self) -> None:
        sender = self._dump(4, *[("send", 1, 0, True)] * 3)
        receiver = self._dump(5, *[("recv", 0, 0, True)] * 3)
        assert len(self._arrows(sender, receiver)) == 3
        del receiver["records"][0]
        assert self._arrows(sender, receiver) == []
        # That of a dead rank is not there at all.
        assert self._arrows(sender) == []

    def test_records_that_say_which_one_they_are_may_be_lost(self) -> None:
        def count(dump: Any) -> Any:
            for number, record in enumerate(dump["records"], 1):
                record["message"] = number
            return dump

        sender = count(self._dump(4, *[("send", 1, 0, True)] * 4))
        receiver = count(self._dump(5, *[("recv", 0, 0, True)] * 3))
        del sender["records"][0], receiver["records"][1]
        assert self._arrows(sender, receiver) == [
            ("4 send → 5 tag 0 #3", "5 recv ← 4 tag 0 #3"),
            ("4 send → 5 tag 0 #4", "5 not issued"),
        ]
        # All that this one has issued may be lost.
        receiver["records"].clear()
        receiver["records"] += self._dump(5, *[("recv", 2, 0, True)] * 9)["records"][8:]
        assert self._arrows(sender, receiver) == []
        # It has received from any rank before.
        for record in receiver["records"]:
            record.update(peer=0, message=0)
        assert self._arrows(sender, receiver) == []

    def test_nothing_is_said_of_what_came_and_of_what_is_on_its_way(self) -> None:
        sender = self._dump(4, ("send", 1, 0, True))
        receiver = self._dump(5, ("recv", 2, 0, True))
        assert self._arrows(sender, self._dump(5), self._dump(6)) == []
        assert self._arrows(self._dump(4), receiver, self._dump(6)) == []

    def test_nothing_is_said_where_a_message_of_any_rank_is_taken(self) -> None:
        sender = self._dump(4, ("send", 1, 0, False), ("send", 1, 1, False))
        receiver = self._dump(5, ("recv", 0, 0, False), ("recv", 0, 1, False))
        receiver["records"][0]["peer"] = None
        assert self._arrows(sender, receiver) == [
            ("4 send → 5 tag 1 #2", "5 recv ← 4 tag 1 #2")
        ]
