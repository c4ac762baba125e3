"""Diagnosis of RPCs that are not answered: which worker they wait for, and where it is.

The records of RPCs have an entry ``rpc``. A worker that waits may itself run the
function for which another one waits: the waits are followed to the function that waits
for no other one.
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
    """`rank` waits in `entry` for rank `awaited`, which runs `served` for it."""

    rank: int
    entry: Entry
    awaited: int
    served: Entry | None


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
                path[-1], stall
            ):
                shown, firsts = found.setdefault(end, (path, []))
                firsts.append(path[0])
                if len(path) > len(shown):
                    found[end] = path, firsts
    for end, (path, firsts) in found.items():
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
    """Return the waits from `entry` to a function that waits for no other one."""
    path: list[_Hop] = []
    following: Entry | None = entry
    seen: set[tuple[int, int]] = set()
    while following is not None:
        awaited = following["rpc"]["peer"]
        wanted = following["rpc"]["function"]
        # A call may come back to a rank that runs the same function already.
        served = next(
            (
                one
                for one in _running(views.get(awaited))
                if (awaited, one["rpc"]["number"]) not in seen
                and (not wanted or one["rpc"]["function"] == wanted)
            ),
            None,
        )
        path.append(_Hop(rank, following, awaited, served))
        if served is None:
            break
        number = served["rpc"]["number"]
        seen.add((awaited, number))
        rank = awaited
        following = next(
            (
                one
                for one in _waits(group, views.get(rank), 0.0)
                if one["rpc"]["within"] == number
            ),
            None,
        )
    return path


def _running(view: RankView | None) -> list[Entry]:
    """Return what a rank runs for others, oldest first."""
    return [
        entry
        for entry in (() if view is None else view.records)
        if "rpc" in entry and entry["state"] == "serving"
    ]


def _stands(hop: _Hop, stall: float) -> bool:
    """Return whether the awaited function has not moved for `stall` seconds."""
    return hop.served is None or hop.served["rpc"]["still_for"] >= stall - _NOTED


def _verdict(
    group: GroupKey,
    end: int,
    path: list[_Hop],
    firsts: list[_Hop],
    views: Mapping[int, RankView],
) -> Verdict:
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
    text += f"; {_doing(path[-1], views.get(end))}"
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


def _doing(hop: _Hop, view: RankView | None) -> str:
    """Return what the awaited rank does with the call."""
    name, one = f"rank {hop.awaited}", hop.served
    if one is not None:
        if one["rpc"]["returned"]:
            function = one["rpc"]["function"]
            return f"on {name}, `{function}` has returned a Future that is not done"
        source = one["frame"]["source"]
        at = f", at {source}" if source else ""
        return f"{name} runs `{one['rpc']['function']}`{at}"
    place = f"; its cell is at {view.location}" if view and view.location else ""
    running = _running(view)
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
    there: dict[int, tuple[RankView, Entry]] = {}
    known = {rank: views.get(rank, RankView(rank)) for rank in group.ranks}
    for rank, view in known.items():
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
        for rank, view in known.items()
        if rank not in there and view.death is None and view.silent_for is None
    ]
    if not stuck or not absent:
        return None
    example = next(iter(stuck.values()))
    places = "; ".join(f"rank {rank} {_whereabouts(known[rank])}" for rank in absent)
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
