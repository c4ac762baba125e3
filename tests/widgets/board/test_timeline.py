"""The timeline's data: lanes of groups."""

from __future__ import annotations

from rankscope.backends import OpType
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.work.flight_recorder import GroupCounters, Record
from rankscope.widgets.board.timeline import timeline


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
