"""The timeline's data: the last works of every rank on one clock, in lanes.

Pure: the caller supplies the dumps and clock offsets. Times of the result are ns
after ``origin_ns`` on the reference clock; -1 stands for "not yet" or "unknown".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.late_findings import LateFinding
from rankscope.backends.observe.lateness import Lateness
from rankscope.backends.observe.records import (
    Record,
    backend_calls,
    sequence_number,
    tag_of,
)
from rankscope.backends.work.op_type import payload

from ..units import bytes_text
from .messages import op_text, pair
from .rows import text

__all__ = ["timeline"]

#: The states of an op that waits for a rank, or has waited in vain.
_WAITS = ("scheduled", "started", "aborted", "timed_out")


@dataclass
class _Work:
    """One bar: an op, or the ops of one backend call."""

    record: Record
    count: int
    created: int
    started: int
    ended: int
    #: The sends to, or receives from, each rank that one backend call ran.
    records: Sequence[Record] = ()
    #: When the last rank entered the same collective, by its own record.
    gathered: int = -1


#: The name and the ranks of a group.
_Group = tuple[str, tuple[int, ...]]


@dataclass
class _Lane:
    """One row of the timeline: a group on a rank."""

    rank: int
    group: str
    members: tuple[int, ...]
    works: list[_Work] = field(default_factory=list)


def timeline(
    dumps: Mapping[int, Mapping[str, Any]],
    offsets_ns: Mapping[int, int],
    now_ns: int,
    limit: int = 200,
    hosts: Mapping[int, str] = {},
    generations: Mapping[GroupKey, int] = {},
) -> dict[str, Any]:
    """Return the lanes of all ranks, with the last `limit` works in each.

    `dumps` maps ranks to the result of `rankscope.backends.observe.export.local_dump`
    there, `offsets_ns` to the ns their clocks are ahead of the reference clock, which
    is at `now_ns`, and `hosts` to the names of their hosts. `generations` has the
    present one of each group that there is; without it nothing counts as over. A lane
    is one group on one rank; its group is a place in ``groups``, which is ``over`` if
    it is gone, or was rebuilt, and others have had ops since. A work is a list::

        [created, started, ended, gathered, op, seq, generation, state, line,
         count, size, root, error, is_p2p]

    where ``op``, ``state``, ``line`` and ``size`` are indices into ``words``.
    ``gathered`` is when the last rank of the group entered the collective; the
    others wait until then. ``messages`` are the sends with their receives, each as the
    places of two lanes, and of the works in them::

        [lane of the sender, send, lane of the receiver, receive]

    -1 in place of a work says that its rank has not issued it.
    """
    lanes = [
        lane
        for rank in sorted(dumps)
        for lane in _lanes(rank, dumps[rank], offsets_ns.get(rank, 0), limit)
    ]
    lanes += _absent(lanes, set(dumps))
    # Large groups first. A rank that was restarted reports its groups in another order.
    lanes.sort(key=lambda one: (one.rank, -len(one.members), one.members, one.group))
    _gather(lanes)
    lateness = Lateness()
    lateness.take(dumps, hosts=hosts)
    works = [work for lane in lanes for work in lane.works]
    origin = min((work.created for work in works), default=now_ns)
    words: dict[str, int] = {}
    groups: dict[_Group, int] = {}
    for lane in lanes:
        groups.setdefault((lane.group, lane.members), len(groups))
    over = _over(lanes, generations)
    return {
        "origin_ns": origin,
        "clock": now_ns - origin,
        "groups": [
            {"name": name, "ranks": list(ranks), "over": (name, ranks) in over}
            for name, ranks in groups
        ],
        "lanes": [
            {
                "rank": lane.rank,
                "group": groups[lane.group, lane.members],
                "works": [_pack(work, lane, origin, words) for work in lane.works],
            }
            for lane in lanes
        ],
        "missing": _missing(lanes, groups, origin),
        "messages": _messages(lanes, set(dumps), now_ns),
        "words": list(words),
        "late": [
            _pack_finding(one, groups, offsets_ns, origin)
            for one in lateness.findings()
        ],
    }


def _lanes(rank: int, dump: Mapping[str, Any], offset: int, limit: int) -> list[_Lane]:
    lanes = {
        group_id: _Lane(rank, text(group["name"], 60), tuple(group["ranks"]))
        for group_id, group in dump["groups"].items()
    }
    for batch in backend_calls(dump["records"]):
        first = batch[0]
        lane = lanes.setdefault(
            first["group_id"], _Lane(rank, text(first["group"], 60), ())
        )
        lane.works.append(
            _Work(
                first,
                len(batch),
                first["time_created_ns"] - offset,
                _moved(first["time_started_ns"], offset),
                _moved(first["time_ended_ns"], offset),
                batch if first["is_p2p"] else (),
            )
        )
    for lane in lanes.values():
        del lane.works[: max(0, len(lane.works) - limit)]
    return list(lanes.values())


def _absent(lanes: Sequence[_Lane], known: set[int]) -> list[_Lane]:
    """Return an empty lane for each member without a dump: a dead rank has a row."""
    groups = dict.fromkeys((lane.group, lane.members) for lane in lanes)
    return [
        _Lane(rank, group, members)
        for group, members in groups
        for rank in members
        if rank not in known
    ]


def _over(lanes: Sequence[_Lane], generations: Mapping[GroupKey, int]) -> set[_Group]:
    """Return the groups with no op since their rebuild, if others have later ones."""
    present = {(text(key.name, 60), key.ranks): n for key, n in generations.items()}
    last: dict[_Group, int] = {}
    old: set[_Group] = set()
    live: set[_Group] = set()
    for lane in lanes:
        group = (lane.group, lane.members)
        for work in lane.works:
            last[group] = max(last.get(group, 0), work.created)
            is_live = work.record["generation"] == present.get(group)
            (live if is_live else old).add(group)
    newest = max((last[group] for group in live), default=0)
    return {group for group in old - live if present and last[group] < newest}


def _moved(time_ns: int, offset: int) -> int:
    return time_ns - offset if time_ns else -1


# -- who entered last ---------------------------------------------------------------

_CollectiveKey = tuple[str, tuple[int, ...], int, int]


def _collectives(lanes: Sequence[_Lane]) -> dict[_CollectiveKey, dict[int, _Work]]:
    """Return each collective → rank → its work there, the first of a number."""
    found: dict[_CollectiveKey, dict[int, _Work]] = defaultdict(dict)
    for lane in lanes:
        for work in lane.works:
            record = work.record
            if record["is_p2p"]:
                continue
            key = (
                lane.group,
                lane.members,
                record["generation"],
                sequence_number(record),
            )
            found[key].setdefault(lane.rank, work)
    return found


def _gather(lanes: Sequence[_Lane]) -> None:
    """Set `gathered` of the works."""
    for (_, members, _, _), works in _collectives(lanes).items():
        over = any(work.record["state"] == "completed" for work in works.values())
        if len(works) < len(members) and not over:
            # A rank has not entered yet.
            continue
        last = max(work.created for work in works.values())
        for work in works.values():
            work.gathered = last


def _pack_finding(
    finding: LateFinding,
    groups: Mapping[_Group, int],
    offsets_ns: Mapping[int, int],
    origin: int,
) -> dict[str, Any]:
    key = finding.group
    begun, ended = (
        time - offsets_ns.get(key.ranks[0], 0) - origin for time in finding.span
    )
    return {
        "group": groups[text(key.name, 60), key.ranks],
        "rank": finding.ranks[0],
        "text": str(finding),
        "span": [begun, ended],
    }


def _missing(
    lanes: Sequence[_Lane], groups: Mapping[_Group, int], origin: int
) -> list[dict[str, Any]]:
    """Return the collectives that some ranks wait in and others have not entered.

    Also those that were aborted, until the rebuilt group has another op. ``held`` are
    the missing ranks that wait elsewhere; last come those where all do, in ``why``.
    """
    latest: dict[_Group, int] = {}
    for lane in lanes:
        key = (lane.group, lane.members)
        used = (work.record["generation"] for work in lane.works)
        latest[key] = max(latest.get(key, 0), *used, 0)
    found = []
    for (group, members, generation, seq), works in _collectives(lanes).items():
        waiting = [work for work in works.values() if work.record["state"] in _WAITS]
        absent = sorted(set(members) - works.keys())
        if waiting and absent and generation == latest[group, members]:
            since = min(work.created for work in waiting)
            ends = {work.ended for work in waiting}
            until = -1 if -1 in ends else max(ends)
            held = _held(lanes, absent, since, until)
            ops = {*held.values()} if len(held) == len(absent) else {""}
            found.append(
                {
                    "group": groups[group, members],
                    "ranks": absent,
                    "seq": seq,
                    "op": waiting[0].record["op"],
                    "since": since - origin,
                    "until": -1 if until == -1 else until - origin,
                    "held": sorted(held),
                    "why": ops.pop() if len(ops) == 1 else "other ops",
                }
            )
    return sorted(found, key=lambda one: bool(one["why"]))


def _held(
    lanes: Sequence[_Lane], ranks: Sequence[int], since: int, until: int
) -> dict[int, str]:
    """Return the op in which each of `ranks` waits meanwhile, of those that wait."""
    ops: dict[int, str] = {}
    for lane in lanes:
        for work in lane.works if lane.rank in ranks else ():
            record = work.record
            begun = until == -1 or work.created < until
            if record["state"] in _WAITS and begun and not -1 < work.ended < since:
                number = sequence_number(record)
                ops[lane.rank] = f"{record['op']} #{number} of group '{lane.group}'"
    return ops


# -- sends and receives ------------------------------------------------------------

#: Nanoseconds after which the other side of a message counts as not issued: the records
#: of the ranks are not taken at one moment.
_SURELY = 1_000_000_000


def _messages(lanes: Sequence[_Lane], known: set[int], now_ns: int) -> list[list[int]]:
    """Return the messages of which both ranks are known; see `timeline`."""
    found: list[list[int]] = []
    places = {
        (lane.group, lane.members, lane.rank): place for place, lane in enumerate(lanes)
    }
    issued: dict[tuple[Any, ...], dict[int, list[tuple[Record, tuple[int, int]]]]] = {}
    for place, lane in enumerate(lanes):
        if not lane.members:
            continue
        for number, work in enumerate(lane.works):
            for record in work.records:
                key = (lane.group, lane.members, record["generation"])
                by_rank = issued.setdefault(key, {})
                by_rank.setdefault(lane.rank, []).append((record, (place, number)))
    for (group, members, _), by_rank in issued.items():
        # A rank that is known, and has issued none in this generation, has all there.
        of_group = {
            rank: by_rank.get(rank, ())
            for rank in members
            if rank in known and (group, members, rank) in places
        }
        for sender, receiver, send, receive in pair(members, of_group):
            if send is None or receive is None:
                there = send or receive
                assert there is not None
                work = lanes[there[0]].works[there[1]]
                done = work.record["state"] == "completed"
                # A message that came was sent: its record is lost. One that was sent
                # and is on its way may have a receive whose record is lost.
                lost = done and (send is None or not of_group[receiver])
                if lost or now_ns - work.created < _SURELY:
                    continue
            here = places[group, members, sender], places[group, members, receiver]
            found.append([*(send or (here[0], -1)), *(receive or (here[1], -1))])
    return found


# -- packing ---------------------------------------------------------------------


def _pack(
    work: _Work, lane: _Lane, origin: int, words: dict[str, int]
) -> list[int | str | None]:
    record = work.record

    def word(value: object) -> int:
        return words.setdefault(text(value, 200), len(words))

    def after(time_ns: int) -> int:
        return time_ns - origin if time_ns >= 0 else -1

    peer, is_p2p = record["peer"], record["is_p2p"]
    error = record["error"]
    return [
        work.created - origin,
        after(work.started),
        after(work.ended),
        after(work.gathered),
        word(_op(work, lane.members)),
        sequence_number(record),
        record["generation"],
        word(record["state"]),
        word(record["frame"]["source"]),
        work.count,
        word(_size(record, len(lane.members))),
        None if is_p2p or peer is None or not lane.members else lane.members[peer],
        text(error, 300) if error else None,
        int(is_p2p),
    ]


def _op(work: _Work, members: Sequence[int]) -> str:
    """Return what the op is called; of a send, to whom."""
    record = work.record
    peers = [one["peer"] for one in work.records]
    if not members or None in peers:
        peers = []
    others = sorted({members[peer] for peer in peers})
    tags = {tag_of(one) for one in work.records}
    return op_text(record["op"], others, tags.pop() if len(tags) == 1 else None)


def _size(record: Record, ranks: int) -> str:
    """Return ``4 MiB float32``, ``""`` for an op without arrays."""
    if not record["dtypes"]:
        return ""
    dtype = record["dtypes"][0]
    size = payload(record["op"], record["sizes"], _itemsize(dtype), ranks)
    return dtype if size is None else f"{bytes_text(size)} {dtype}"


def _itemsize(dtype: str) -> int:
    """Return the bytes of one element, by the digits in the name of its dtype."""
    digits = "".join(ch for ch in dtype if ch.isdigit())
    return int(digits) // 8 if digits else 1
