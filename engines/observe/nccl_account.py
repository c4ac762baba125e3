"""What NCCL itself says about the communicators of a group that hangs, as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.rank_sets import name_ranks

from ..status import ClusterStatus
from ..wire.requests import NcclReport

__all__ = ["account", "account_of_group"]

#: Seconds between two requests for a report that is under way.
_NAP = 0.1
#: State of a rank in a report → what is said of it; other states are errors.
_STATES = {
    "unresponsive": "does not answer NCCL",
    "dead": "is dead for NCCL",
    "gone": "is not in the communicator any more",
    "abort": "has aborted the communicator",
    "finalize": "is ending the communicator",
    "init": "is still creating the communicator",
}

Ask = Callable[[int], NcclReport | None]


def account_of_group(
    group: GroupKey, status: ClusterStatus, ask: Ask, seconds: float
) -> str:
    """Return a sentence about the communicators of `group`; empty if there is none."""
    members = [status.ranks[rank] for rank in group.ranks]
    users = [
        one.rank
        for one in members
        if one.state in ("busy", "idle")
        and any(
            name.startswith("nccl (device")
            for known in one.groups
            if known.key == group
            for name in known.devices.values()
        )
    ]
    if not users:
        return ""
    deadline = time.monotonic() + seconds
    while True:
        report = ask(users[0])
        if report is None:
            return ""
        if not report["pending"] or time.monotonic() > deadline:
            break
        time.sleep(_NAP)
    return account(report["communicators"], {one.rank: one.pid for one in members})


def account(
    communicators: Sequence[Mapping[str, Any]], members: Mapping[int, int]
) -> str:
    """Return what a report says of the group whose `members` are rank → process.

    The communicators of a group are those of its size whose ranks are its processes, in
    order. A group has one for each device and one for each split of the same ranks.
    """
    ranks, pids = list(members), list(members.values())
    mine = [one for one in communicators if _is_of(one, pids)]
    sentences = dict.fromkeys(_describe(one, ranks) for one in mine)
    if not sentences:
        return ""
    return "NCCL's own report (RAS): " + "; ".join(sentences)


def _is_of(one: Mapping[str, Any], pids: Sequence[int]) -> bool:
    known = {rank["rank"]: rank["pid"] for rank in one["ranks"] if rank["pid"] >= 0}
    return (
        one["size"] == len(pids)
        and bool(known)
        and all(
            0 <= rank < len(pids) and pids[rank] == pid for rank, pid in known.items()
        )
    )


def _describe(one: Mapping[str, Any], ranks: Sequence[int]) -> str:
    clauses = []
    states: dict[str, list[int]] = {}
    for rank in one["ranks"]:
        if rank["state"] != "running":
            states.setdefault(rank["state"], []).append(ranks[rank["rank"]])
    for state, those in states.items():
        said = _STATES.get(state) or f"reports {state.removeprefix('error: ')!r}"
        clauses += [f"rank {rank} {said}" for rank in those]
    agreed = []
    for function in _functions(one):
        counts = _counts(one, function, ranks)
        if len(counts) > 1:
            launched = ", ".join(
                f"{count} on {name_ranks(those)}"
                for count, those in sorted(counts.items(), reverse=True)
            )
            clauses.append(f"{function} launched {launched}")
        else:
            agreed += [f"{function} {count}" for count in counts]
    if agreed and not clauses:
        clauses.append(f"every rank has launched {', '.join(agreed)}")
    return ", ".join(clauses) or "no operation was launched"


def _functions(one: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys(one["others"])
    for rank in one["ranks"]:
        names.update(dict.fromkeys(rank["counts"]))
    return list(names)


def _counts(
    one: Mapping[str, Any], function: str, ranks: Sequence[int]
) -> dict[int, list[int]]:
    """Return how often `function` was launched → on which ranks."""
    counts: dict[int, list[int]] = {}
    named = {rank["rank"]: rank for rank in one["ranks"]}
    for place, rank in enumerate(ranks):
        entry = named.get(place)
        if entry is not None and entry["state"] in ("unresponsive", "dead", "gone"):
            continue
        # A report of text names the ranks that differ from the most, and no others.
        if entry is None or (one["others"] and function not in entry["counts"]):
            if function in one["others"]:
                counts.setdefault(one["others"][function], []).append(rank)
            continue
        counts.setdefault(entry["counts"].get(function, 0), []).append(rank)
    return counts
