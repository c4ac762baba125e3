"""The collectives that all ranks enter before one leaves, and who was late to each.

Pure functions on records. A rank is late in an op if it enters behind the longest gap
between two ranks that enter. Its own time, outside of every op since the collective
before, is by its own clock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from statistics import median
from typing import Any, NamedTuple

from ..work.op_type import spec_of
from ..work.record_fields import UNSEEN
from .records import Record, position, sequence_number

__all__ = [
    "LATE",
    "Clocks",
    "Entry",
    "Followed",
    "JointOp",
    "Moment",
    "align",
    "followed",
    "number_of",
    "share_of",
    "slim",
    "why_unknown",
]

#: Nanoseconds by which ranks have to enter after the others to be late.
LATE = 100_000
#: Nanoseconds in which a rank that waits at once has begun to.
AT_ONCE = 500_000
#: Ops that all ranks leave when they end, which tell enough without others.
EXITS = 5
#: In so many ns two clocks drift apart by one at most: 100 ppm.
DRIFT = 10_000

#: Records of all ranks together that are judged once they have ended, and those that
#: each has at least.
_IN_ALL, _LEAST = 25_600, 24
#: What is needed of a record here, beside its line.
_NEEDED = (
    *("group_id", "generation", "collective_seq_id", "op", "backend", "is_p2p"),
    *("state", "sizes", "dtypes", "splits"),
    *("time_created_ns", "time_ended_ns", "time_waited_ns"),
)


def share_of(ranks: int, most: int) -> int:
    """Return how many records of each of so many ranks are judged: `most`, or fewer."""
    return max(_LEAST, min(most, _IN_ALL // max(1, ranks)))


def slim(record: Record) -> dict[str, Any]:
    """Return what is needed of a record to tell who was late, as plain data."""
    return {
        **{name: record[name] for name in _NEEDED},
        "uncounted_id": record.get("uncounted_id", 0),
        "device_ns": record.get("device_ns"),
        "frame": {"source": record["frame"]["source"]},
    }


class Followed(NamedTuple):
    """A joint collective of a rank, and what the rank did since the one before it."""

    record: Record
    before: Record
    #: Ns that it waited in other ops since.
    blocked: int
    #: Whether it has sent or received since, had parts of unequal size, or ops of which
    #: it is not known how long it waited in them: it may be late for others' time.
    excused: bool


class Entry(NamedTuple):
    """One rank in one collective; times are ns on its own clock."""

    entered: int
    left: int
    #: When the rank began to wait for its end; 0: it did not, as far as is seen.
    waited: int
    #: Ns outside of every op since the rank left the collective before.
    own: int
    #: When it left the collective before.
    left_before: int
    #: As in `Followed`.
    excused: bool
    #: The user's line.
    line: str
    #: That of the op in its group.
    number: int

    @classmethod
    def of(cls, found: Followed, left: int) -> Entry:
        """Return the entry of a rank by its records.

        If it is by the events of a GPU, `left` is when the ranks have left: they do so
        together, and no event tells a time of day.
        """
        record, left_before = found.record, found.before["time_ended_ns"]
        entered, waited = record["time_created_ns"], record["time_waited_ns"]
        own = entered - left_before - found.blocked
        if record.get("device_ns"):
            own, took = record["device_ns"]
            # A stream waits in an op from where it has come to it.
            entered = waited = left - took
            left_before = entered - own
        else:
            left = record["time_ended_ns"]
        return cls(
            entered,
            left,
            max(0, waited),
            own,
            left_before,
            found.excused,
            record["frame"]["source"],
            sequence_number(record),
        )


#: One collective: each rank of its group → its entry.
JointOp = Mapping[int, Entry]


def number_of(record: Record) -> tuple[int, int, int]:
    """Return what orders the collectives of a group."""
    return record["generation"], *position(record)


def why_unknown(record: Record) -> str:
    """Return why a record does not tell when its rank was there; empty if it does."""
    if record["backend"] == "nccl":
        if record.get("device_ns"):
            return ""
        return (
            "NCCL's ops are recorded when they are enqueued, not when a GPU is there, "
            "and no event of the GPU tells it"
        )
    if record.get("time_waited_ns") is None:
        return "nothing tells since when a rank waits for its ops"
    return ""


def followed(records: Iterable[Record]) -> Iterator[Followed]:
    """Yield the joint collectives of a rank, oldest first, but for the first one."""
    # Group and generation → the last joint collective, and what came since.
    since: dict[tuple[str, int], tuple[Record, int, bool]] = {}
    # The same, or what else a rank may wait in → when its last op has ended.
    ends: dict[tuple[str, int] | None, int] = {}
    for record in records:
        key = record["group_id"], record["generation"]
        unequal = _is_unequal(record)
        unknown = bool(why_unknown(record)) or record["time_waited_ns"] == UNSEEN
        # Where a root does not wait for the others, or they not for each other, who is
        # late is not known.
        joint = spec_of(record["op"]).joint
        # Nor where a rank has an array without an element: it may not wait, either.
        is_joint = joint and not unequal and all(map(all, record["sizes"]))
        if is_joint and key in since:
            before, blocked, excused = since[key]
            if record.get("device_ns"):
                # Its stream may have waited for any op that was in flight since.
                others = max(
                    (end for one, end in ends.items() if one != key), default=0
                )
                excused = excused or others > before["time_created_ns"]
            if number_of(before) < number_of(record):
                yield Followed(record, before, blocked, excused)
            elif record["time_created_ns"] < before["time_ended_ns"]:
                # Another op of the same call; else the group was destroyed and made
                # again, and this is its first op.
                continue
        place = key if is_joint else None
        ended = record["time_ended_ns"] or sys.maxsize
        ends[place] = max(ended, ends.get(place, 0))
        for other, (before, blocked, excused) in since.items():
            if other != key or not is_joint:
                blocked += _blocked(record)
                since[other] = before, blocked, excused or unequal or unknown
        if is_joint:
            # Of one of which nobody knows who waits, the end is not exact, either.
            since[key] = record, 0, bool(why_unknown(record))


def _is_unequal(record: Record) -> bool:
    """Return whether ranks may have different work by design: pipelines, experts."""
    if record["is_p2p"] or any(record.get("splits") or ()):
        return True
    sizes = {tuple(size) for size in record["sizes"]}
    return spec_of(record["op"]).runs_empty and len(sizes) > 1


def _blocked(record: Record) -> int:
    began = record.get("time_waited_ns") or 0
    return max(0, record["time_ended_ns"] - began) if began > 0 else 0


# -- clocks --------------------------------------------------------------------------


@dataclass(frozen=True)
class Clocks:
    """By how many ns the clocks of hosts differ from that of the first one."""

    hosts: Mapping[int, str] = field(default_factory=dict)
    ahead: Mapping[str, int] = field(default_factory=dict)
    #: By how many they may differ from that.
    error: int = 0
    #: Whether that holds whoever leaves an op late.
    exact: bool = True
    #: Whether there are none: times are by the events of GPUs.
    by_events: bool = False

    def of(self, rank: int) -> int:
        return self.ahead.get(self.hosts.get(rank, ""), 0)


def align(ops: Sequence[JointOp], hosts: Mapping[int, str]) -> Clocks:
    """Align the clocks of hosts by collectives, which their ranks leave together.

    No rank leaves before the last one has entered: ops that are short for the ranks of
    both hosts bound how far their clocks differ. Without such ops a host whose ranks
    always leave later looks as one whose clock is ahead: the error is twice what an op
    takes once all ranks are in.
    """
    if len({hosts.get(rank, "") for one in ops for rank in one}) < 2:
        return Clocks(hosts)
    seen: dict[str, list[tuple[int, int, int]]] = {}
    exits = [all(map(_leaves_as_it_ends, one.values())) for one in ops]
    if sum(exits) < EXITS:
        exits = [True] * len(ops)
    for one in ops:
        entered, left = dict[str, int](), dict[str, int]()
        for rank, entry in one.items():
            host = hosts.get(rank, "")
            entered[host] = max(entry.entered, entered.get(host, entry.entered))
            left[host] = min(entry.left, left.get(host, entry.left))
        first = next(iter(left))
        for host in left:
            least, most = entered[host] - left[first], left[host] - entered[first]
            seen.setdefault(host, []).append((least, left[host] - left[first], most))
    times = [next(iter(one.values())).left for one in ops]
    drift = (max(times) - min(times)) // DRIFT
    takes = median(
        min(one.left - one.entered for one in op.values())
        for op in compress(ops, exits)
    )
    ahead, error, exact = dict[str, int](), 0, True
    for host, some in seen.items():
        if host == next(iter(seen)):
            ahead[host] = 0
            continue
        least, most = max(one[0] for one in some), min(one[2] for one in some)
        together = sorted(one[1] for one in compress(some, exits))
        tenth = len(together) // 10
        usual = int(median(together))
        spread = (together[-1 - tenth] - together[tenth] + 1) // 2
        by_leaving = max(spread, int(2 * takes))
        by_bounds = (most - least + 1) // 2 + drift
        # What is out of bounds by less than its error is moved into them.
        nearest = usual
        if least <= most:
            nearest = max(least - drift, min(usual, most + drift))
        off = abs(nearest - usual)
        bounded = least <= most and (off > by_leaving or by_bounds <= by_leaving)
        ahead[host] = (least + most) // 2 if bounded else nearest
        error = max(error, by_bounds if bounded else by_leaving + off)
        exact = exact and bounded
    return Clocks(hosts, ahead, error, exact)


def _leaves_as_it_ends(entry: Entry) -> bool:
    """Return whether a rank leaves its op when it ends, not when it comes to wait."""
    began = entry.waited
    return not entry.entered + AT_ONCE < began < entry.left < began + LATE


# -- one op ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """Who was late in one op; times are ns on one clock."""

    op: JointOp
    #: Rank → when it entered, the first one first.
    entered: Mapping[int, int]
    #: The ranks that entered behind the longest gap, at most half of all, rounded up;
    #: empty: nobody was late.
    late: frozenset[int]
    #: Rank → ns that it waited for the last one to enter.
    waits: Mapping[int, int]

    @classmethod
    def of(cls, op: JointOp, clocks: Clocks) -> Moment:
        """Compare when the ranks entered `op`."""
        order = sorted(
            (one.entered - clocks.of(rank), rank) for rank, one in op.items()
        )
        times, ranks = [at for at, _ in order], [rank for _, rank in order]
        gaps = [later - at for at, later in pairwise(times)]
        gap = max(gaps)
        late = frozenset(ranks[gaps.index(gap) + 1 :])
        if gap <= max(LATE, 2 * clocks.error) or 2 * len(late) > len(ranks) + 1:
            late = frozenset()
        waits = {
            rank: max(
                0,
                min(times[-1] + clocks.of(rank), one.left)
                - max(one.entered, one.waited or one.left),
            )
            for rank, one in op.items()
        }
        return cls(op, {rank: at for at, rank in order}, late, waits)

    def last(self, count: int) -> frozenset[int]:
        return frozenset([*self.entered][-count:])

    @property
    def number(self) -> int:
        return next(iter(self.op.values())).number

    def by(self, late: frozenset[int]) -> int:
        """Return by how many ns `late` entered after all others."""
        return _after(self.entered, late)

    def excess(self, late: frozenset[int]) -> int:
        """Return by how many ns the own time of `late` is above that of all others."""
        return _after({rank: one.own for rank, one in self.op.items()}, late)

    def own(self, late: frozenset[int]) -> tuple[int, int]:
        """Return the least own time of `late`, and of the others, in ns.

        Of the others, the one that nothing has delayed tells what the step takes.
        """
        own = {rank: one.own for rank, one in self.op.items()}
        return min(own[rank] for rank in late), min(
            time for rank, time in own.items() if rank not in late
        )

    def left_late(self, late: frozenset[int], clocks: Clocks) -> int:
        """Return by how many ns `late` left the op before after all others."""
        left = {r: one.left_before - clocks.of(r) for r, one in self.op.items()}
        return _after(left, late)

    def excused(self, late: frozenset[int]) -> bool:
        return any(self.op[rank].excused for rank in late)


def _after(times: Mapping[int, int], ranks: frozenset[int]) -> int:
    """Return the least of `ranks` less the most of the others."""
    least = min(times[rank] for rank in ranks)
    return least - max(time for rank, time in times.items() if rank not in ranks)
