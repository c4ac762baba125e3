"""Groups that wait for each other: ranks that use two groups in different orders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .records import Record as Entry
from .records import position
from .verdicts import RankView

__all__ = ["Wait", "describe", "find_cycle"]

_IN_FLIGHT = ("scheduled", "started")


class Wait(NamedTuple):
    """`rank` is in the collective `entry`, which `awaited` has not entered."""

    rank: int
    entry: Entry
    awaited: int


def find_cycle(rank: int, views: Mapping[int, RankView]) -> list[Wait]:
    """Return the waits that lead from `rank` back to it; ``[]`` if there are none.

    A rank waits for those ranks of its group that have not entered the collective it
    is in. Only the groups whose ranks a view names are considered.
    """
    return _search(rank, rank, views, set())


def describe(cycle: list[Wait]) -> str:
    """Return ``the groups 'dp' and 'tp' wait for each other: rank 0 in …``."""
    names = dict.fromkeys(repr(wait.entry["group"]) for wait in cycle)
    who = (
        f"the groups {' and '.join(names)} wait for each other"
        if len(names) > 1
        else "the ranks wait for each other"
    )
    waits = ", ".join(
        f"rank {wait.rank} in `{wait.entry['op']}` #{wait.entry['collective_seq_id']} "
        f"of group {wait.entry['group']!r} for rank {wait.awaited}"
        for wait in cycle
    )
    return f"{who}: {waits}; issue their ops in the same order on all ranks"


def _search(
    rank: int, target: int, views: Mapping[int, RankView], seen: set[int]
) -> list[Wait]:
    seen.add(rank)
    entry = _blocking(views.get(rank))
    if entry is None:
        return []
    for awaited in _absent(rank, entry, views):
        wait = Wait(rank, entry, awaited)
        if awaited == target:
            return [wait]
        if awaited not in seen:
            rest = _search(awaited, target, views, seen)
            if rest:
                return [wait, *rest]
    return []


def _blocking(view: RankView | None) -> Entry | None:
    """Return the oldest collective that the rank has in flight."""
    if view is None or view.death is not None or view.silent_for is not None:
        return None
    return next(
        (
            entry
            for entry in view.records
            if entry["state"] in _IN_FLIGHT and not entry["is_p2p"]
        ),
        None,
    )


def _absent(rank: int, entry: Entry, views: Mapping[int, RankView]) -> list[int]:
    """Return the ranks of the group of `entry` that have not entered its op."""
    group, place = entry["group_id"], position(entry)
    return [
        other
        for other in views[rank].groups.get(group, ())
        if other != rank
        and other in views
        and not any(
            one["group_id"] == group
            and one["generation"] == entry["generation"]
            and position(one) >= place
            for one in views[other].records
        )
    ]
