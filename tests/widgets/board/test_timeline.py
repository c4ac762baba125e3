"""The timeline's data: lanes of groups."""

from __future__ import annotations

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
    lanes = timeline({0: dump}, {}, 5)["lanes"]
    assert [(one["group"], one["ranks"], len(one["works"])) for one in lanes] == [
        ("tp", [0, 1], 2),
        ("tp", [0, 2], 2),
        # The other ranks are dead: they keep their rows.
        ("tp", [0, 1], 0),
        ("tp", [0, 2], 0),
    ]
