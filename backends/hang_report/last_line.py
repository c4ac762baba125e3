"""What a job that ends well says of its last ops: who kept the others waiting.

Each rank leaves what tells of them where the ranks of its host meet; who finds that no
other one is left to come tells. Nobody waits: a rank that died leaves nothing, and is
not waited for. `over_hosts` has what is done where ranks are on several hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..groups.world import world
from ..observe.export import local_dump
from ..observe.joint_ops import share_of, slim
from ..observe.late_findings import late_lines
from ..observe.lateness import Lateness
from .meeting import Meeting

__all__ = ["last_line", "last_ops", "sentence_of", "tells"]

#: The newest records that a rank leaves: fewer where the host has many ranks.
LAST = 600
_LEFT, _TOLD = "last_ops", "last_line"


def last_ops(last: int = LAST) -> dict[str, Any]:
    """Return groups and records of the last ops, those of destroyed groups, too."""
    groups: dict[str, Any] = {}
    records: list[Mapping[str, Any]] = []
    for source in world.sources:
        groups.update(source.past.get("groups", {}))
        records += source.past.get("records", ())
    try:
        mine = local_dump(last)
    except ValueError:
        # It is in no group of ours, and was in none.
        pass
    else:
        groups.update(mine["groups"])
        records += map(slim, mine["records"])
    records.sort(key=lambda one: int(one["time_created_ns"]))
    return {"groups": groups, "records": records[-last:]}


def last_line(meeting: Meeting, ops: Mapping[str, Any] | None = None) -> str:
    """Leave the last ops of this rank; return what those of all ranks of the host tell.

    `ops` is what it leaves, if not `last_ops`.

    Empty where nothing is certain, or other ranks are yet to leave theirs.
    """
    ranks = [*meeting.known()]
    if len(ranks) < 2:
        return ""
    mine = ops or last_ops(share_of(len(ranks), LAST))
    meeting.put(f"{_LEFT}_{meeting.rank}", dict(mine))
    found = {rank: meeting.get(f"{_LEFT}_{rank}") for rank in ranks}
    left = {rank: one for rank, one in found.items() if one is not None}
    if any(meeting.lives(rank) for rank in ranks if rank not in left):
        return ""
    # Two that come at the same time both find all of them.
    return sentence_of(left) if tells(meeting) else ""


def tells(meeting: Meeting) -> bool:
    """Whether this rank says the last line: no other one of its host has come to it."""
    return meeting.put(_TOLD, {})


def sentence_of(
    left: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str] = {}
) -> str:
    """Return what the last ops of ranks on `hosts` tell; empty: nothing is certain."""
    lateness = Lateness(ended=True)
    lateness.take(left, hosts=hosts)
    return next(iter(late_lines(lateness.findings())), "")
