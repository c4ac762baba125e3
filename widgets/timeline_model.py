"""The timeline's data: the last works of every rank on one clock, in lanes.

Pure: rings and clock offsets come from whoever can reach the ranks. Times in
what it makes are ns after ``origin_ns``, on the reference clock; -1 stands for
"not yet" or "not known".
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rankscope.backends.bandwidth import payload

from .board_rows import text
from .ranks import name_ranks
from .units import bytes_text, duration_text

__all__ = ["timeline"]

Record = Mapping[str, Any]

_IN_FLIGHT = ("scheduled", "started")

#: Collectives that must have been seen before anybody is called a straggler,
#: and the part of them that it must have been last in.
_ENOUGH = 4
_MOSTLY = 0.6


@dataclass
class _Work:
    """What is drawn as one bar: an op, or ops that one backend call did."""

    record: Record
    count: int
    created: int
    started: int
    ended: int
    #: When the last rank entered the same collective, by its own account.
    gathered: int = -1


@dataclass
class _Lane:
    rank: int
    group: str
    members: tuple[int, ...]
    works: list[_Work] = field(default_factory=list)


def timeline(
    rings: Mapping[int, Mapping[str, Any]],
    offsets_ns: Mapping[int, int],
    now_ns: int,
    limit: int = 200,
) -> dict[str, Any]:
    """Return the lanes of all ranks, with the last `limit` works in each.

    `rings` maps ranks to what `rankscope.backends.export.ring` returns there,
    `offsets_ns` to the ns their clocks are ahead of the reference clock, which
    is at `now_ns`. A lane is one group on one rank. A work is a list::

        [created, started, ended, gathered, op, seq, generation, state, line,
         count, size, peer, error]

    where ``op``, ``state``, ``line`` and ``size`` are indices into ``words``.
    ``gathered`` is when the last rank of the group entered the collective;
    before it every other one waits.
    """
    lanes = [
        lane
        for rank in sorted(rings)
        for lane in _lanes(rank, rings[rank], offsets_ns.get(rank, 0), limit)
    ]
    spreads = _gather(lanes)
    works = [work for lane in lanes for work in lane.works]
    origin = min((work.created for work in works), default=now_ns)
    words: dict[str, int] = {}
    return {
        "origin_ns": origin,
        "clock": now_ns - origin,
        "lanes": [
            {
                "rank": lane.rank,
                "group": lane.group,
                "ranks": list(lane.members),
                "works": [_pack(work, lane, origin, words) for work in lane.works],
            }
            for lane in lanes
        ],
        "missing": _missing(lanes, origin),
        "words": list(words),
        **_straggler(spreads),
    }


def _lanes(rank: int, ring: Mapping[str, Any], offset: int, limit: int) -> list[_Lane]:
    members: Mapping[str, Sequence[int]] = ring["groups"]
    lanes: dict[str, _Lane] = {
        name: _Lane(rank, text(name, 60), tuple(ranks))
        for name, ranks in members.items()
    }
    # The dispatcher numbers a group's ops and the ring keeps them in this order.
    for _, run in groupby(ring["records"], _one_call):
        batch = list(run)
        first = batch[0]
        lane = lanes.setdefault(
            first["group"], _Lane(rank, text(first["group"], 60), ())
        )
        lane.works.append(
            _Work(
                first,
                len(batch),
                first["time_created_ns"] - offset,
                _moved(first["time_started_ns"], offset),
                _moved(first["time_ended_ns"], offset),
            )
        )
    for lane in lanes.values():
        del lane.works[: max(0, len(lane.works) - limit)]
    return list(lanes.values())


def _moved(time_ns: int, offset: int) -> int:
    return time_ns - offset if time_ns else -1


def _one_call(record: Record) -> tuple[Any, ...]:
    """Equal for the ops of a batch that one backend call did, together."""
    return (
        record["group"],
        record["generation"],
        record["op"],
        _seq(record),
        record["time_started_ns"],
        record["time_ended_ns"],
    )


def _seq(record: Record) -> int:
    return record["p2p_seq_id"] if record["is_p2p"] else record["collective_seq_id"]


# -- who came last ---------------------------------------------------------------

_Meeting = tuple[str, tuple[int, ...], int, int]


def _meetings(lanes: Sequence[_Lane]) -> dict[_Meeting, dict[int, _Work]]:
    """Each collective → rank → its work there, the first one of a number."""
    found: dict[_Meeting, dict[int, _Work]] = defaultdict(dict)
    for lane in lanes:
        for work in lane.works:
            record = work.record
            if record["is_p2p"]:
                continue
            key = (lane.group, lane.members, record["generation"], _seq(record))
            found[key].setdefault(lane.rank, work)
    return found


def _gather(lanes: Sequence[_Lane]) -> list[tuple[int, int]]:
    """Note in the works when all had entered; return (last rank, ns it was late)."""
    spreads = []
    for (_, members, _, _), works in _meetings(lanes).items():
        over = any(work.record["state"] == "completed" for work in works.values())
        if len(works) < len(members) and not over:
            # Somebody has not come yet.
            continue
        last = max(works, key=lambda rank: works[rank].created)
        for work in works.values():
            work.gathered = works[last].created
        if len(works) == len(members) > 1:
            first = min(work.created for work in works.values())
            spreads.append((last, works[last].created - first))
    return spreads


def _missing(lanes: Sequence[_Lane], origin: int) -> list[dict[str, Any]]:
    """The collectives that some ranks wait in and others have not entered."""
    latest: dict[tuple[str, tuple[int, ...]], int] = {}
    for group, members, generation, _ in _meetings(lanes):
        key = (group, members)
        latest[key] = max(latest.get(key, 0), generation)
    found = []
    for (group, members, generation, seq), works in _meetings(lanes).items():
        waiting = [
            work for work in works.values() if work.record["state"] in _IN_FLIGHT
        ]
        absent = sorted(set(members) - works.keys())
        if waiting and absent and generation == latest[group, members]:
            found.append(
                {
                    "group": group,
                    "members": list(members),
                    "ranks": absent,
                    "seq": seq,
                    "op": waiting[0].record["op"],
                    "since": min(work.created for work in waiting) - origin,
                }
            )
    return found


def _straggler(spreads: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Say who is late, if it is mostly the same rank."""
    nobody = {"straggler": None, "summary": ""}
    if len(spreads) < _ENOUGH:
        return nobody
    last, times = Counter(rank for rank, _ in spreads).most_common(1)[0]
    if times < _MOSTLY * len(spreads):
        return nobody
    late = statistics.median(late for rank, late in spreads if rank == last)
    summary = (
        f"{name_ranks([last]).capitalize()} entered last in {times} of {len(spreads)} "
        f"collectives, {duration_text(late / 1e9)} after the first (median)"
    )
    return {"straggler": last, "summary": summary}


# -- packing ---------------------------------------------------------------------


def _pack(
    work: _Work, lane: _Lane, origin: int, words: dict[str, int]
) -> list[int | str | None]:
    record = work.record

    def word(value: object) -> int:
        return words.setdefault(text(value, 200), len(words))

    def after(time_ns: int) -> int:
        return time_ns - origin if time_ns >= 0 else -1

    peer = record["peer"]
    error = record["error"]
    return [
        work.created - origin,
        after(work.started),
        after(work.ended),
        after(work.gathered),
        word(record["op"]),
        _seq(record),
        record["generation"],
        word(record["state"]),
        word(record["frame"]["source"]),
        work.count,
        word(_size(record, len(lane.members))),
        lane.members[peer] if peer is not None and lane.members else None,
        text(error, 300) if error else None,
    ]


def _size(record: Record, ranks: int) -> str:
    """``4 MiB float32``; nothing for an op without arrays."""
    if not record["dtypes"]:
        return ""
    dtype = record["dtypes"][0]
    size = payload(record["op"], record["sizes"], _itemsize(dtype), ranks)
    return dtype if size is None else f"{bytes_text(size)} {dtype}"


def _itemsize(dtype: str) -> int:
    """Bytes of one element, by the digits that end the name of its type."""
    digits = "".join(ch for ch in dtype if ch.isdigit())
    return int(digits) // 8 if digits else 1
