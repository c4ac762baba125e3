"""The groups that a log names, their members, and how far each rank came in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ..observe.evidence import (
    UNKNOWN_ARRAYS,
    Arrays,
    Group,
    GroupEvidence,
    IssuedOp,
    Progress,
    RankEvidence,
    SourceLine,
)
from .desync import DesyncReport, LastOp
from .log_lines import GroupLine, WorkLine

__all__ = ["LogGroups"]

_P2P = ("send", "recv", "coalesced")


@dataclass
class _TimedOut:
    """An op that timed out on a rank, and its line's place in the log."""

    order: int
    work: WorkLine
    #: How often a line has told it: the error that ends the process repeats it.
    seen: int = 1
    #: Whether a group is known to have it.
    is_placed: bool = False


@dataclass
class _Member:
    """One rank in one group; numbers that its lines do not have are None."""

    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    #: The op that timed out, and its place among those of the rank.
    work: WorkLine | None = None
    order: int = 0
    line: SourceLine | None = None
    #: The log that has its lines.
    source: str = ""

    @property
    def counts_p2p(self) -> bool:
        """Whether its numbers are of sends and receives, too, as far as they show."""
        mixed = (self.completed or 0) > (self.enqueued or 0)
        return mixed or (self.work is not None and self.work.op in _P2P)

    def add(self, line: GroupLine) -> None:
        # After an op has failed, the watchdog counts it as completed.
        if self.enqueued is None and line.enqueued is not None:
            self.started = None if line.started is None else max(0, line.started)
            self.completed = max(0, line.completed or 0)
        self.enqueued = max(self.enqueued or 0, line.enqueued or 0)


@dataclass
class _Group:
    id: str
    name: str = ""
    is_default: bool = False
    size: int | None = None
    #: Rank in the group → global rank.
    places: dict[int, int] = field(default_factory=dict)
    #: By global rank; a rank that is only named has none.
    members: dict[int, _Member] = field(default_factory=dict)
    #: What a desync report tells, by the rank in the group.
    reported: dict[int, LastOp] = field(default_factory=dict)
    #: Several groups of one split have this name: whose peer a rank is, is not known.
    is_shared: bool = False

    def place(self, place: int, rank: int) -> None:
        self.is_shared |= self.places.setdefault(place, rank) != rank

    def join(self, other: _Group) -> None:
        self.size = self.size or other.size
        self.is_shared |= other.is_shared
        for place, rank in other.places.items():
            self.place(place, rank)
        self.members.update(other.members)
        self.take(other.reported)

    def take(self, reported: Mapping[int, LastOp]) -> None:
        """Take what a desync report tells; of several, the latest of each rank."""
        for place, last in reported.items():
            known = self.reported.get(place, last)
            self.reported[place] = max(known, last)

    def untold(self) -> Iterator[tuple[int, LastOp]]:
        """Yield global ranks that have no counters of their own, but a report has."""
        for place, last in sorted(self.reported.items()):
            rank = place if self.is_default else self.places.get(place)
            if rank is None:
                continue
            member = self.members.get(rank)
            if member is None or (member.enqueued is None and member.work is None):
                yield rank, last

    def group(self, present: Collection[int], world: int | None) -> Group:
        """Return the group with its members, as far as they are certain.

        Groups have their ranks in ascending order: between 8 and 10 there is 9 only.
        """
        name = self.name or self.id
        if self.is_default:
            last = max([*self.places.values(), *present], default=-1)
            ranks = tuple(range(world or last + 1))
            return Group(name, ranks, self.id, world is not None)
        ranks_of = [
            self.places.get(place, self._between(place))
            for place in range(self.size or max(self.places) + 1)
        ]
        known = tuple(rank for rank in ranks_of if rank is not None)
        complete = self.size is not None and len(known) == len(ranks_of)
        return Group(name, known, self.id, complete)

    def _between(self, place: int) -> int | None:
        """Return the rank at a place that no line names, if only one is possible."""
        low, high = -1, None
        for other in sorted(self.places):
            if other < place:
                low = other
            elif high is None:
                high = other
        lowest = self.places.get(low, -1)
        if high is None or self.places[high] - lowest != high - low:
            return None
        return lowest + place - low


class LogGroups:
    """Collects the lines of a log that name a group."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], _Group] = {}
        #: Ranks whose op timed out.
        self.timed_out: set[int] = set()
        #: Ops that timed out, by rank: their group is that of a later line.
        self._pending: dict[int, list[_TimedOut]] = {}
        #: The user's line that issued an op, by its rank and number in the log.
        self._user_lines: dict[tuple[int, int], SourceLine] = {}
        self._lines = 0
        #: The group that a line of each rank has named last.
        self._latest: dict[int, tuple[str, str]] = {}

    @property
    def world_size(self) -> int | None:
        """The size of the group of all ranks, where a line has it."""
        sizes = [one.size for one in self._groups.values() if one.is_default]
        return next((size for size in sizes if size is not None), None)

    def add_work(self, rank: int, work: WorkLine) -> None:
        """Take an op that timed out on a rank; the group is that of a later line."""
        self._lines += 1
        self.timed_out.add(rank)
        pending = self._pending.setdefault(rank, [])
        for one in pending:
            if one.work == work:
                one.seen += 1
                return
        pending.append(_TimedOut(self._lines, work))

    def add_line(self, rank: int, line: SourceLine | None) -> None:
        """Take the line that issued the op of `rank` which timed out last."""
        pending = self._pending.get(rank)
        if pending and line is not None:
            self._user_lines[rank, pending[-1].order] = line

    def add(self, rank: int, line: GroupLine) -> None:
        key = (line.id, line.name)
        group = self._groups.setdefault(key, _Group(line.id, line.name))
        group.is_default = group.is_default or line.is_default
        group.size = line.size or group.size
        group.place(line.place, rank)
        self._latest[rank] = key
        if line.enqueued is None:
            return
        member = group.members.setdefault(rank, _Member())
        member.add(line)
        found = self._failed(rank, line) if member.work is None else None
        if found is not None:
            member.work, member.order = found.work, found.order
            found.is_placed = True

    def _failed(self, rank: int, line: GroupLine) -> _TimedOut | None:
        """Return the op that a line means; None: it may be one of several.

        The lines of the watchdogs of a rank's groups mix, and their ops may have one
        number.
        """
        found = [
            one
            for one in self._pending.get(rank, ())
            if (one.work.place, one.work.seq) == (line.place, line.failed)
        ]
        free = [one for one in found if not one.is_placed]
        # Two groups may have ops that are alike.
        chosen = free or [one for one in found if one.seen > 1]
        return chosen[0] if len(chosen) == 1 else None

    def add_report(self, rank: int, report: DesyncReport) -> None:
        """Take the desync report of `rank`; the group is that of its last line."""
        key = self._latest.get(rank)
        if key is None and len(self._groups) == 1:
            key = next(iter(self._groups))
        elif key is None and not self._groups:
            key = "0", "default_pg"
        if key is None:
            return
        group = self._groups.setdefault(key, _Group(*key, key[1] == "default_pg"))
        group.take(report.last)
        group.size = group.size or report.size

    def _of_one_group(self) -> None:
        """Give the ops without a group to the only one: its lines may be cut off."""
        if len(self._groups) > 1:
            return
        group = next(iter(self._groups.values()), None)
        if group is None:
            group = self._groups["0", "default_pg"] = _Group("0", "default_pg", True)
        for rank, pending in self._pending.items():
            for one in pending:
                member = group.members.setdefault(rank, _Member())
                if one.work.place == rank and member.work is None and group.is_default:
                    member.work, member.order = one.work, one.order
                    group.place(rank, rank)

    def join(self, other: LogGroups, path: str) -> None:
        """Take what another log tells, which has the path `path`."""
        other._of_one_group()
        for key, group in other._groups.items():
            for rank, member in group.members.items():
                member.source = path
                member.line = other._user_lines.get((rank, member.order))
            known = self._groups.get(key)
            if known is None:
                known = _Group(group.id, group.name, group.is_default)
                self._groups[key] = known
            known.join(group)

    def evidence(
        self, present: Collection[int], world: int | None, groups: Collection[Group]
    ) -> Iterator[RankEvidence]:
        """Yield what is known of each rank; those `present` have a line."""
        by_rank: dict[int, dict[Group, GroupEvidence]] = {}
        sources: dict[int, str] = {}
        for group in self._groups.values():
            if not (group.members or group.reported):
                continue
            if group.is_shared:
                for rank, member in group.members.items():
                    alone = Group(group.name or group.id, (rank,), group.id, False)
                    by_rank.setdefault(rank, {})[alone] = _group_evidence(member, True)
                continue
            key = _known(group, groups) or group.group(present, world)
            p2p = any(one.counts_p2p for one in group.members.values())
            for rank, member in group.members.items():
                by_rank.setdefault(rank, {})[key] = _group_evidence(member, p2p)
                sources[rank] = member.source
            for rank, last in group.untold():
                if rank in key.ranks and not p2p:
                    by_rank.setdefault(rank, {})[key] = _reported(last)
        for rank, found in sorted(by_rank.items()):
            # The watchdog's counters are records, as far as they go.
            counted = any(one.progress.enqueued is not None for one in found.values())
            yield RankEvidence(rank, found, recorded=counted, source=sources.get(rank))


def _known(group: _Group, groups: Collection[Group]) -> Group | None:
    """Return the group as other files tell of it, if only one can be meant."""
    found = [
        one
        for one in groups
        if one.id == group.id
        and one.name in (group.name, group.id, "default_pg")
        and group.members.keys() <= set(one.ranks)
    ]
    return found[0] if len(found) == 1 else None


def _group_evidence(member: _Member, p2p: bool) -> GroupEvidence:
    ops = () if member.work is None else (_op(member.work, member),)
    if p2p:
        # Sends and receives, which have numbers of their own, are counted with these.
        return GroupEvidence(ops)
    return GroupEvidence(
        ops, Progress(member.enqueued, member.started, member.completed)
    )


def _reported(last: LastOp) -> GroupEvidence:
    ops: tuple[IssuedOp, ...] = ()
    if last.op and not last.is_over:
        # The last op that it has enqueued, which may wait for earlier ones.
        op = IssuedOp(last.op, last.seq, 0, "unknown", retired=True)
        ops = (op,)
    completed = last.seq if last.is_over else None
    return GroupEvidence(ops, Progress(last.seq, completed=completed))


def _op(work: WorkLine, member: _Member) -> IssuedOp:
    arrays = UNKNOWN_ARRAYS
    if work.elements is not None:
        inputs, outputs = work.elements
        arrays = Arrays(inputs=((inputs,),), outputs=((outputs,),))
    return IssuedOp(
        work.op,
        work.seq,
        member.order,
        "unknown",
        retired=False,
        is_p2p=work.op in _P2P,
        arrays=arrays,
        line=member.line,
        timeout=work.timeout,
    )
