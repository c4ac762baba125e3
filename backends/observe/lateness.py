"""Who keeps the others waiting: the ranks that are late to collectives that complete.

Pure: the caller supplies the records of the ranks, again and again if it likes; what is
kept is bounded. A rank is named only where chance does not explain it, and for time
that it has spent outside of every op by its own clock. What the records do not tell is
not known, and nobody is named for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..groups.key import GroupKey
from ..rank_sets import name_ranks
from ..work.op_type import payload
from .joint_ops import (
    Clocks,
    Entry,
    Followed,
    JointOp,
    Moment,
    align,
    followed,
    number_of,
    why_unknown,
)
from .late_findings import PAUSE, LateFinding, bursts_of, first_finding
from .late_patterns import Pattern
from .records import Record
from .speeds import Speed, Speeds
from .torch_format import ITEMSIZES

__all__ = ["GroupLateness", "Lateness", "RankLateness", "findings_of"]

#: Ops of one line that count; what begins late in a long run is named soon, since the
#: last ones are judged by themselves, too.
KEPT = 120
RECENT = (20, 60, KEPT)
#: Entries of one line that are kept, or `KEPT` ops: of a step with several ops at it,
#: only one may count.
ENTRIES = 1920
#: Lines of a group, and groups, that are kept.
LINES, GROUPS = 32, 64
#: A line is left out where these many of its ops, and ns, are overdue: it runs no more.
OVERDUE = 3
GRACE = 1_000_000_000


#: The op, the line at which most ranks enter it, and whether events of GPUs tell when.
Where = tuple[str, str, bool]


@dataclass(frozen=True)
class RankLateness:
    """One rank of a group, over the ops that are kept."""

    #: In how many of how many ops it was late, and by how many seconds in the middle.
    late: int
    of: int
    by: float
    #: The part of its time that it waited for ranks that came after it.
    waits: float


@dataclass(frozen=True)
class GroupLateness:
    """A group, over the ops that are kept."""

    key: GroupKey
    #: Rank → how late it was; empty where nothing is known.
    ranks: Mapping[int, RankLateness]
    findings: tuple[LateFinding, ...] = ()
    #: Why nothing is known; empty where something is.
    unknown: str = ""
    #: Seconds by which the clocks of hosts may differ; 0 where the ranks share one.
    clock_error: float = 0.0
    #: Whether it is by the events of GPUs.
    by_events: bool = False
    #: What took most of the time once all ranks were in.
    speeds: tuple[Speed, ...] = ()
    #: Ops that do not count: there was a pause, as where the first one connects.
    pauses: int = 0
    #: Whether there were ops before those that count.
    later: bool = False


@dataclass
class _Group:
    key: GroupKey
    #: The number of the last collective that was taken, and when it was entered.
    taken: tuple[int, int, int] = (-1, -1, -1)
    taken_ns: int = 0
    #: Op, line, whether by events of GPUs → the last ones there.
    lines: dict[Where, deque[JointOp]] = field(default_factory=dict)
    speeds: Speeds = field(default_factory=Speeds)
    unknown: str = ""
    #: The ranks without records at the last look at its ops.
    absent: tuple[int, ...] = ()


class Lateness:
    """Which ranks keep the others waiting in collectives that complete.

    It takes the records of the ranks as they come, and keeps the last ops of each line.

    Parameters
    ----------
    ended : bool, default False
        Whether the ranks have come to their end: then lines count that are left.
    """

    def __init__(self, *, ended: bool = False) -> None:
        self._ended = ended
        self._hosts: dict[int, str] = {}
        # Group id → what is kept of it.
        self._groups: dict[str, _Group] = {}

    def take(
        self,
        dumps: Mapping[int, Mapping[str, Any]],
        *,
        hosts: Mapping[int, str] = {},
        since_ns: Mapping[int, int] = {},
    ) -> None:
        """Take what is new in the flight recorders of ranks.

        Parameters
        ----------
        dumps : mapping
            Rank → what `FlightRecords.dumps` has of it. An op counts once every rank of
            its group is there, and has completed it.
        hosts : mapping, optional
            Rank → the name of its host, each of which has a clock; ranks that are not
            in it share one.
        since_ns : mapping, optional
            Rank → the time on its clock from which on it may enter ops that count.
        """
        self._hosts.update(hosts)
        found: dict[str, dict[tuple[int, int, int], dict[int, Followed]]] = {}
        for rank, dump in dumps.items():
            for group_id, group in dump["groups"].items():
                key = GroupKey(group["name"], tuple(group["ranks"]))
                if len(key.ranks) > 1:
                    self._groups.setdefault(group_id, _Group(key))
            latest: dict[str, tuple[int, int, int]] = {}
            if not self._ended:
                self._forget_rebuilt(dump["records"])
            for one in followed(dump["records"]):
                record, number = one.record, number_of(one.record)
                group_id = record["group_id"]
                ops = found.setdefault(group_id, {})
                if number <= latest.get(group_id, (-1, -1, -1)):
                    # The group was destroyed and made again: numbers start anew.
                    for ranks in ops.values():
                        ranks.pop(rank, None)
                latest[group_id] = number
                if record["time_created_ns"] >= since_ns.get(rank, 0):
                    ops.setdefault(number, {})[rank] = one
        for group_id, group in self._groups.items():
            for number, ranks in sorted(found.get(group_id, {}).items()):
                if ranks.keys() == {*group.key.ranks}:
                    self._add(group, number, ranks)
            if group_id in found:
                group.absent = tuple(sorted({*group.key.ranks} - dumps.keys()))
        while len(self._groups) > GROUPS:
            del self._groups[next(iter(self._groups))]

    def _forget_rebuilt(self, records: Iterable[Record]) -> None:
        """Forget what is known of groups that have been used since their rebuild.

        The first op of a generation tells nothing, but what was before is over.
        """
        for record in records:
            group = self._groups.get(record["group_id"])
            if group and group.lines and record["generation"] > group.taken[0]:
                group.lines.clear()
                group.speeds = Speeds()

    @staticmethod
    def _add(
        group: _Group, number: tuple[int, int, int], ranks: Mapping[int, Followed]
    ) -> None:
        records = [ranks[rank].record for rank in sorted(ranks)]
        at = records[0]["time_created_ns"]
        if at <= group.taken_ns or any(one["state"] != "completed" for one in records):
            return
        if number[0] != group.taken[0] or number <= group.taken:
            # The group was rebuilt or made again, perhaps with other processes.
            group.lines.clear()
            group.speeds = Speeds()
        group.taken, group.taken_ns = number, at
        group.unknown = next(filter(None, map(why_unknown, records)), "")
        if group.unknown or len({one["op"] for one in records}) > 1:
            return
        by_events = bool(records[0].get("device_ns"))
        lines = Counter(one["frame"]["source"] for one in records)
        where = records[0]["op"], str(lines.most_common(1)[0][0]), by_events
        ops = group.lines.pop(where, None) or deque(
            maxlen=max(KEPT, ENTRIES // len(ranks))
        )
        entries = {
            rank: Entry.of(ranks[rank], records[0]["time_ended_ns"])
            for rank in sorted(ranks)
        }
        ops.append(entries)
        if size := _size(records[0], len(ranks)):
            takes = min(one.left - one.entered for one in entries.values())
            group.speeds.add(records[0]["op"], size, takes)
        # That of the last op comes last.
        group.lines[where] = ops
        while len(group.lines) > LINES:
            del group.lines[next(iter(group.lines))]

    def groups(self) -> list[GroupLateness]:
        """Return what is known of each group with an op, or why nothing is.

        Returns
        -------
        list of GroupLateness
            Each with its ranks: how often they were late, and how long they waited.
        """
        return [
            self._judge(group)
            for group in self._groups.values()
            if group.lines or group.unknown or group.absent
        ]

    def findings(self) -> list[LateFinding]:
        """Return what is certain, the most expensive first.

        Returns
        -------
        list of LateFinding
            Each names ranks, op, lines and cost; as text, a sentence.
        """
        return findings_of(self.groups())

    def _judge(self, group: _Group) -> GroupLateness:
        if group.unknown:
            return GroupLateness(group.key, {}, unknown=group.unknown)
        if not group.lines:
            why = f"no records have come of {name_ranks(group.absent)}"
            return GroupLateness(group.key, {}, unknown=why)
        lines = group.lines if self._ended else _current(group.lines)
        by_clocks = [one for where, ops in lines.items() if not where[2] for one in ops]
        clocks, events = align(by_clocks, self._hosts), Clocks(by_events=True)
        moments = {
            where: [Moment.of(one, events if where[2] else clocks) for one in ops]
            for where, ops in lines.items()
        }
        # Of what runs, what it does now; else as much as is known.
        counts = RECENT[::-1] if self._ended else RECENT
        found = [
            finding
            for (op, line, by_events), ops in moments.items()
            if (
                finding := first_finding(
                    ops, counts, group.key, op, line, events if by_events else clocks
                )
            )
        ]
        if self._ended:
            # On a loaded machine the order in which ranks leave one op and enter the
            # next, right after it, is the algorithm's: no link need be slow.
            found = [one for one in found if one.pattern is not Pattern.LEAVES_LATE]
        latest = _of_one_time([*moments.values()])
        bursts = bursts_of(sorted(latest, key=lambda one: one.number))
        took = [_longest(one) for one in bursts]
        most = PAUSE * median(took)
        kept = [
            one
            for burst, its in zip(bursts, took, strict=True)
            if its <= most
            for one in burst
        ]
        ranks = {rank: _of_rank(rank, kept) for rank in group.key.ranks}
        return GroupLateness(
            group.key,
            ranks,
            tuple(found),
            clock_error=clocks.error / 1e9,
            by_events=not by_clocks,
            speeds=group.speeds.told(len(ranks)),
            pauses=len(latest) - len(kept),
            later=len(latest) < sum(map(len, moments.values())),
        )


def findings_of(groups: Iterable[GroupLateness]) -> list[LateFinding]:
    """Return the findings of all `groups`, the most expensive first."""
    found = [one for group in groups for one in group.findings]
    return sorted(found, key=lambda one: -one.share)


def _size(record: Record, ranks: int) -> int:
    """Return the bytes that an op moves; 0: none, or it is not known."""
    itemsize = ITEMSIZES.get(next(iter(record.get("dtypes", ())), ""))
    if itemsize is None:
        return 0
    return payload(record["op"], record["sizes"], itemsize, ranks) or 0


def _current(
    lines: Mapping[Where, Sequence[JointOp]],
) -> dict[Where, Sequence[JointOp]]:
    """Return the lines whose next op was not due long before the last op of all."""
    newest = max(_left(ops[-1]) for ops in lines.values())
    found = {}
    for where, ops in lines.items():
        period = (_left(ops[-1]) - _left(ops[0])) / max(1, len(ops) - 1)
        if newest - _left(ops[-1]) <= OVERDUE * period + GRACE:
            found[where] = ops
    return found


def _of_one_time(lines: Sequence[Sequence[Moment]]) -> list[Moment]:
    """Return the ops since all of each line are kept: of rare ones, older ones are."""
    lines = [ops[-KEPT:] for ops in lines]
    since = max((_left(ops[0].op) for ops in lines if len(ops) == KEPT), default=0)
    return [one for ops in lines for one in ops if _left(one.op) >= since]


def _left(op: JointOp) -> int:
    return next(iter(op.values())).left


def _longest(burst: Sequence[Moment]) -> int:
    """Return the ns from the end of the op before to the end of `burst`, at most."""
    return max(
        entry.left - burst[0].op[rank].left_before
        for rank, entry in burst[-1].op.items()
    )


def _of_rank(rank: int, ops: Sequence[Moment]) -> RankLateness:
    by = [one.by(one.late) for one in ops if rank in one.late]
    waited = sum(one.waits[rank] for one in ops)
    spent = sum(one.op[rank].left - one.op[rank].left_before for one in ops)
    waits = min(1.0, waited / spent) if spent > 0 else 0.0
    return RankLateness(len(by), len(ops), median(by) / 1e9 if by else 0.0, waits)
