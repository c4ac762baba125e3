"""The tabs of the groups: their order, their names, and which of them are copies."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import Verdict, on_group
from rankscope.backends.rank_sets import brief_members

from .group import NO_GROUP, Group
from .rows import text

__all__ = ["place_of", "tabs_of"]


def place_of(key: GroupKey, first: str) -> tuple[Any, ...]:
    """Return by what groups are in the order of their tabs.

    The group of all ranks, which ranks report `first`, has the first one, and the
    ranks without a group have the last. The others go by name, ``dp_9`` before
    ``dp_10``.
    """
    parts = re.split(r"(\d+)", text(key.name, 60))
    name = [int(one) if place % 2 else one for place, one in enumerate(parts)]
    return key.name == NO_GROUP, key.name != first, name, key.ranks


def tabs_of(
    groups: Sequence[Group], verdicts: Sequence[Verdict]
) -> list[dict[str, Any]]:
    """Return the data of the tab of each group."""
    names = [group.name for group in groups]
    keys = {group.key for group in groups}
    copies = _copies(groups)
    found = []
    for group in groups:
        label = group.name
        if names.count(group.name) > 1:
            label += f" ({brief_members(group.ranks)})"
        if group.library:
            label += f" · {group.library}"
        info = group.info(label, on_group(verdicts, group.key))
        facts = info["facts"]
        name, count = _counted(group.key.name)
        if count > 1 and GroupKey(name, group.ranks) in keys:
            facts = [facts[0], f"number {count} of this name", *facts[1:]]
        found.append({**info, "facts": facts, "copy": group.key in copies})
    return found


def _copies(groups: Sequence[Group]) -> set[GroupKey]:
    """Return the idle groups of which there is a newer one: a cell ran again.

    ``rows (2)`` has the ranks of ``rows``, which nobody may use any more.
    """
    newest: dict[tuple[str, tuple[int, ...]], tuple[int, GroupKey]] = {}
    known = []
    for group in groups:
        name, count = _counted(group.key.name)
        one = (name, group.ranks)
        known.append((one, group))
        newest[one] = max(newest.get(one, (0, group.key)), (count, group.key))
    return {
        group.key
        for one, group in known
        if newest[one][1] != group.key
        and all(row["mood"] in ("calm", "busy") for row in group.base.values())
    }


@functools.lru_cache(4096)
def _counted(name: str) -> tuple[str, int]:
    """Return the name that a program gave a group, and which of that name it is."""
    found = re.fullmatch(r"(.+) \((\d{1,9})\)", name)
    return (found[1], int(found[2])) if found else (name, 1)
