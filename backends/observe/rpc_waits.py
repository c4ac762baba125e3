"""Diagnosis of RPCs that are not answered: which worker they wait for, and where it is.

The records of RPCs have an entry ``rpc``. A worker that waits may itself run the
function for which another one waits: the waits are followed to the worker that waits
for nobody, or around in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..groups.key import GroupKey
from ..rank_sets import name_ranks
from .records import Record as Entry
from .verdicts import Fault, RankView, Verdict

__all__ = ["diagnose_rpcs", "is_rpc"]

#: The calls for which all workers have to come.
_MEETINGS = ("init_rpc", "shutdown")

# Seconds after which a rank notes at which line a function is, at the latest.
_NOTED = 1.5


def is_rpc(group: GroupKey, views: Mapping[int, RankView]) -> bool:
    """Return whether the ops of `group` are RPCs."""
    return any(
        "rpc" in entry and entry["group_id"] == group.id
        for view in views.values()
        for entry in view.records
    )


class _Hop(NamedTuple):
    """`rank` waits in the call `entry` for the worker of rank `awaited`."""

    rank: int
    entry: Entry
    awaited: int


def diagnose_rpcs(
    group: GroupKey,
    views: Mapping[int, RankView],
    stall: float,
    explained: Iterable[int],
) -> list[Verdict]:
    """Return a verdict for each rank on which calls older than `stall` s depend.

    A call is no hang while the function that it waits for moves: it has to be seen at
    one line for about `stall` seconds. `explained` are the ranks that have a verdict
    already.
    """
    known = set(explained)
    verdicts = [
        verdict
        for op in _MEETINGS
        if (verdict := _meeting(group, views, stall, op)) is not None
    ]
    found: dict[int, tuple[list[_Hop], list[_Hop]]] = {}
    for rank in group.ranks:
        for entry in _waits(group, views.get(rank), stall):
            path = _follow(group, rank, entry, views)
            end = path[-1].awaited
            if known.isdisjoint({end, *(hop.awaited for hop in path)}) and _stands(
                path[-1], views, stall
            ):
                shown, firsts = found.setdefault(end, (path, []))
                firsts.append(path[0])
                if len(path) > len(shown):
                    found[end] = path, firsts
    circles: set[frozenset[int]] = set()
    for end, (path, firsts) in found.items():
        ranks = frozenset(hop.rank for hop in path)
        if end in ranks:
            if ranks in circles:
                continue
            circles.add(ranks)
        verdicts.append(_verdict(group, end, path, firsts, views))
    return verdicts


def _waits(group: GroupKey, view: RankView | None, stall: float) -> list[Entry]:
    """Return the calls to one worker in which a rank is stuck, oldest first."""
    if view is None or view.death is not None or view.silent_for is not None:
        return []
    return [
        entry
        for entry in view.records
        if _is_wait(entry, group)
        and entry["rpc"]["peer"] is not None
        and view.now_ns - entry["time_created_ns"] >= stall * 1e9
    ]


def _is_wait(entry: Entry, group: GroupKey) -> bool:
    return (
        "rpc" in entry and entry["group_id"] == group.id and entry["state"] == "started"
    )


def _follow(
    group: GroupKey, rank: int, entry: Entry, views: Mapping[int, RankView]
) -> list[_Hop]:
    """Return the waits from `entry` to a rank that waits for nobody, or to a circle."""
    path = [_Hop(rank, entry, entry["rpc"]["peer"])]
    while True:
        last = path[-1]
        if last.awaited in {hop.rank for hop in path}:
            return path
        served = _served(last, views)
        following = next(
            (
                one
                for one in _waits(group, views.get(last.awaited), 0.0)
                if served and one["rpc"]["within"] == served[0]["rpc"]["number"]
            ),
            None,
        )
        if following is None:
            return path
        path.append(_Hop(last.awaited, following, following["rpc"]["peer"]))


def _served(hop: _Hop, views: Mapping[int, RankView]) -> list[Entry]:
    """Return what the awaited rank runs for others: the function of `hop`, or all."""
    view = views.get(hop.awaited)
    running = [
        entry
        for entry in (() if view is None else view.records)
        if "rpc" in entry and entry["state"] == "serving"
    ]
    wanted = hop.entry["rpc"]["function"]
    return [one for one in running if one["rpc"]["function"] == wanted] or (
        running if not wanted else []
    )


def _stands(hop: _Hop, views: Mapping[int, RankView], stall: float) -> bool:
    """Return whether the awaited function has not moved for `stall` seconds."""
    served = _served(hop, views)
    return not served or any(
        one["rpc"]["still_for"] >= stall - _NOTED for one in served
    )


def _verdict(
    group: GroupKey,
    end: int,
    path: list[_Hop],
    firsts: list[_Hop],
    views: Mapping[int, RankView],
) -> Verdict:
    circle = end in {hop.rank for hop in path}
    waiting = tuple(sorted({hop.rank for hop in (*path, *firsts)} - {end}))
    hops = []
    for hop in path:
        where = f"{hop.entry['frame']['source']} `{hop.entry['op']}`".lstrip()
        function = hop.entry["rpc"]["function"]
        hops.append(
            f"rank {hop.rank} waits in {where}"
            + (f" for `{function}`" if function else "")
        )
    text = ", ".join(hops)
    others = {hop.rank for hop in firsts} - {hop.rank for hop in path}
    if others:
        text += f"; {name_ranks(others)} {'wait' if len(others) > 1 else 'waits'} too"
    if circle:
        ranks = [*(hop.rank for hop in path), end]
        start = ranks.index(end)
        text += f"; the calls wait for each other: {_arrows(ranks[start:])}"
    else:
        text += f"; {_doing(path[-1], views)}"
    first = path[0].entry
    return Verdict(
        Fault.UNANSWERED_RPC,
        group,
        (end,),
        waiting,
        first["op"],
        first["p2p_seq_id"],
        text,
    )


def _arrows(ranks: list[int]) -> str:
    return " → ".join(f"rank {rank}" for rank in ranks)


def _doing(hop: _Hop, views: Mapping[int, RankView]) -> str:
    """Return what the awaited rank does with the call."""
    name = f"rank {hop.awaited}"
    view = views.get(hop.awaited)
    served = _served(hop, views)
    if served:
        one = served[0]
        if one["rpc"]["returned"]:
            function = one["rpc"]["function"]
            return f"on {name}, `{function}` has returned a Future that is not done"
        source = one["frame"]["source"]
        at = f", at {source}" if source else ""
        return f"{name} runs `{one['rpc']['function']}`{at}"
    running = [
        entry
        for entry in (() if view is None else view.records)
        if "rpc" in entry and entry["state"] == "serving"
    ]
    place = f"; its cell is at {view.location}" if view and view.location else ""
    if running:
        what = ", ".join(
            f"`{one['rpc']['function']}` ({one['frame']['source'] or 'in a library'})"
            for one in running[:4]
        )
        return f"{name} does not run it now, but {what}{place}"
    return f"{name} runs no function for others now{place}"


def _meeting(
    group: GroupKey, views: Mapping[int, RankView], stall: float, op: str
) -> Verdict | None:
    """Return the verdict where ranks wait in `op` and others have not called it."""
    there = {}
    for rank in group.ranks:
        view = views.get(rank, RankView(rank))
        for entry in view.records:
            if _is_wait(entry, group) and entry["rpc"]["call"] == op:
                there.setdefault(rank, (view, entry))
    stuck = {
        rank: entry
        for rank, (view, entry) in there.items()
        if view.now_ns - entry["time_created_ns"] >= stall * 1e9
    }
    absent = [
        rank
        for rank in group.ranks
        if rank not in there
        and (view := views.get(rank)) is not None
        and view.death is None
        and view.silent_for is None
    ]
    if not stuck or not absent:
        return None
    example = next(iter(stuck.values()))
    places = "; ".join(f"rank {rank} {_whereabouts(views[rank])}" for rank in absent)
    verb = "wait" if len(stuck) > 1 else "waits"
    return Verdict(
        Fault.UNANSWERED_RPC,
        group,
        tuple(absent),
        tuple(stuck),
        op,
        example["p2p_seq_id"],
        f"{name_ranks(absent)} did not call {op}: {places}; {name_ranks(stuck)} {verb} "
        f"in {example['frame']['source']} `{op}`",
    )


def _whereabouts(view: RankView) -> str:
    if view.location:
        return f"is at {view.location}"
    return view.last_cell_exit or "runs no cell"
