"""One group at the time of the hang: who has issued what, and who waits for whom."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ..evidence import Evidence, Group, GroupEvidence, IssuedOp

__all__ = ["ONE_SIDED", "GroupScene", "Place", "Wait", "scenes_of", "stale_ranks"]

#: Collectives that a rank may complete although others have not entered them.
ONE_SIDED = frozenset(("broadcast", "reduce", "gather", "scatter", "send", "recv"))


#: What is equal for the ranks that wait in the same op.
Place = tuple[Group, int, str]


@dataclass(frozen=True)
class Wait:
    """`rank` is in the op `seq` of `group`, which does not complete."""

    rank: int
    group: Group
    seq: int
    #: The op as its record tells; None if only its number is known.
    op: IssuedOp | None
    #: The ranks that have not issued it or its other side, or ended before it was over.
    absent: tuple[int, ...] = ()
    #: The ranks of which that is not known.
    unknown: tuple[int, ...] = ()
    #: The ranks that have completed it.
    ahead: tuple[int, ...] = ()
    #: The ranks of which one is enough: it receives what any of them sends.
    any_of: tuple[int, ...] = ()
    #: The other side of a send or receive, if it was issued.
    other: IssuedOp | None = None
    #: For a receive without its send: what was sent instead, with a tag that the rank
    #: has asked for in no receive.
    stray: IssuedOp | None = None
    #: The ranks in `absent` may also have completed their side, and `other` may belong
    #: to another op: what is over is not listed.
    unsure: bool = False

    @property
    def awaited(self) -> set[int]:
        """The ranks that it may wait for."""
        return {*self.absent, *self.unknown, *self.any_of}

    @property
    def name(self) -> str:
        return self.op.op if self.op is not None else ""

    @property
    def is_p2p(self) -> bool:
        """Whether it is a send or a receive."""
        return self.op is not None and self.op.is_p2p

    @property
    def lacks_peer(self) -> bool:
        """Whether it waits for one rank, and nothing tells which one."""
        return self.op is not None and self.op.lacks_peer

    @property
    def is_full(self) -> bool:
        """Whether all ranks are in, and none has completed it."""
        known = self.is_p2p or self.group.complete
        known = known and not self.lacks_peer
        return known and not (self.absent or self.unknown or self.ahead or self.any_of)

    @property
    def place(self) -> Place:
        """What is equal for the ranks that wait in the same op."""
        return self.group, self.seq, self.name if self.is_p2p else ""


class Numbered:
    """The collectives of one rank in one group, by number: several in a batch."""

    def __init__(self, ops: tuple[IssuedOp, ...]) -> None:
        ordered = all(one.seq <= other.seq for one, other in pairwise(ops))
        self.ops = ops if ordered else tuple(sorted(ops, key=_seq))
        self.last = self.ops[-1].seq if self.ops else None

    def get(self, seq: int) -> tuple[IssuedOp, ...]:
        """Return the ops of a number, none if it is not listed."""
        first = bisect_left(self.ops, seq, key=_seq)
        last = bisect_right(self.ops, seq, lo=first, key=_seq)
        return self.ops[first:last]


def _seq(op: IssuedOp) -> int:
    return op.seq


class GroupScene:
    """The collectives of one group, of the ranks whose records are there."""

    def __init__(self, group: Group, known: Mapping[int, GroupEvidence]) -> None:
        self.group = group
        self.known = known
        #: The number of each rank's last collective, where it is known.
        self.issued: dict[int, int] = {}
        #: The number up to which each rank's collectives have completed, if known.
        self.completed: dict[int, int] = {}
        #: The number of the first collective that each rank has in flight.
        self.head: dict[int, int] = {}
        #: Each rank's collectives, by number.
        self.at: dict[int, Numbered] = {}
        #: The numbers of each rank's collectives that may be what the job hangs in.
        self.open: dict[int, list[int]] = {}
        #: Whether ranks send and receive in the group.
        self.has_p2p = False
        for rank, evidence in known.items():
            self._take(rank, evidence)

    def _take(self, rank: int, evidence: GroupEvidence) -> None:
        collectives = evidence.ops
        if any(op.is_p2p for op in collectives):
            self.has_p2p = True
            collectives = tuple(op for op in collectives if not op.is_p2p)
        self.at[rank] = at = Numbered(collectives)
        done = evidence.progress.completed
        highest = at.last
        waiting: list[int] = []
        undone: list[int] = []
        for op in at.ops:
            if op.state == "completed":
                done = op.seq if done is None or op.seq > done else done
                continue
            # What has failed has not completed, whatever a counter says.
            undone.append(op.seq)
            if op.in_flight:
                waiting.append(op.seq)
        least = min(undone, default=None)
        if waiting:
            self.head[rank] = min(waiting)
        # Of the last op, its source may not tell whether it has failed.
        self.open[rank] = [*waiting, *(one for one in undone if one == highest)]
        numbers = [highest, evidence.progress.enqueued, done]
        if evidence.lists_all:
            numbers.append(0)
        known = [number for number in numbers if number is not None]
        if known:
            self.issued[rank] = max(known)
        if done is None and evidence.lists_all:
            done = 0
        if evidence.lists_all_in_flight and evidence.over_is_completed and known:
            over = self.head.get(rank, self.issued[rank] + 1) - 1
            done = max(done or 0, over)
        if done is not None:
            self.completed[rank] = done if least is None else min(done, least - 1)
            following = self.completed[rank] + 1
            if not evidence.lists_all_in_flight and following <= self.issued[rank]:
                self.head[rank] = min(self.head.get(rank, following), following)

    def op(self, rank: int, seq: int) -> IssuedOp | None:
        """Return the collective `seq` of `rank`, the first one of a batch."""
        ops = self.at[rank].get(seq) if rank in self.at else ()
        return ops[0] if ops else None

    def last_p2p(self, rank: int) -> int | None:
        """Return the number of the last send or receive of `rank`, None: not known."""
        ops = self.known[rank].ops if rank in self.known else ()
        return max((op.seq for op in ops if op.is_p2p), default=None)

    def named(self, seq: int) -> IssuedOp | None:
        """Return the collective `seq` of any rank."""
        found = (self.op(rank, seq) for rank in self.at)
        return next((op for op in found if op is not None), None)

    def stale(self) -> dict[int, int]:
        """Return ranks whose records are older than those of others → a lower bound.

        A rank that has completed an op which needs all ranks proves that all have
        issued it: who has not according to its records did so after they were read.
        """
        done = max(self.completed.values(), default=0)
        found = {}
        for rank, issued in self.issued.items():
            if issued < done:
                later = range(issued + 1, done + 1)[-50:]
                ops = {seq: op for seq in later if (op := self.named(seq)) is not None}
                proof = [seq for seq, op in ops.items() if op.op not in ONE_SIDED]
                if proof or not ops:
                    found[rank] = max(proof, default=done)
        return found

    def waits(self, stale: Collection[int]) -> list[Wait]:
        """Return the first collective that each rank waits in."""
        bounds = self.stale()
        places: dict[int, tuple[tuple[int, ...], ...]] = {}
        found = []
        for rank, seq in self.head.items():
            if rank in stale:
                continue
            if seq not in places:
                places[seq] = self._others(seq, stale, bounds)
            op = self.op(rank, seq)
            absent, unknown, ahead = places[seq]
            found.append(Wait(rank, self.group, seq, op, absent, unknown, ahead))
        return found

    def _others(
        self, seq: int, stale: Collection[int], bounds: Mapping[int, int]
    ) -> tuple[tuple[int, ...], ...]:
        """Return who is absent from an op, of whom it is not known, who is ahead."""
        absent: list[int] = []
        unknown: list[int] = []
        ahead: list[int] = []
        needed = self._needs_all(seq)
        for rank in self.group.ranks:
            if rank in stale:
                if bounds.get(rank, self.issued.get(rank, 0)) < seq:
                    unknown.append(rank)
            elif rank not in self.issued:
                known = self.known.get(rank)
                # It has not in flight what is not over without it.
                out = needed and known is not None and known.lists_all_in_flight
                (absent if out else unknown).append(rank)
            elif self.issued[rank] < seq:
                absent.append(rank)
            elif self.completed.get(rank, 0) >= seq:
                ahead.append(rank)
        return tuple(absent), tuple(unknown), tuple(ahead)

    def _needs_all(self, seq: int) -> bool:
        """Return whether an op is over on no rank, since most that are known are in it.

        Were it over on one, all of these would be behind.
        """
        op = self.named(seq)
        if op is None or op.op in ONE_SIDED:
            return False
        inside = sum(head == seq for head in self.head.values())
        silent = self.known.keys() - self.issued.keys()
        return inside > len(silent) and all(
            one.over_is_completed for one in self.known.values()
        )


def scenes_of(evidence: Evidence) -> list[GroupScene]:
    """Return a scene of each group of which a rank's records tell something."""
    known: dict[Group, dict[int, GroupEvidence]] = {}
    for rank, one in evidence.ranks.items():
        for group, found in one.groups.items():
            known.setdefault(group, {})[rank] = found
    ordered = sorted(known, key=lambda group: (group.name, group.id, group.ranks))
    return [GroupScene(group, known[group]) for group in ordered]


def stale_ranks(scenes: Iterable[GroupScene]) -> frozenset[int]:
    """Return the ranks whose records are older than those of others; see `stale`."""
    return frozenset(rank for scene in scenes for rank in scene.stale())
