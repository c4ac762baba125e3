"""What the rules look at: all groups together; and what they find."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from ..callers import Callers
from ..evidence import Evidence, GroupEvidence, RankEvidence
from ..verdicts import Fault
from .differences import Difference, difference_of_pair, first_difference
from .pairs import Match, Pairs
from .scene import GroupScene, Wait, scenes_of, stale_ranks

__all__ = ["Cause", "Picture", "issue_order"]

#: Ops of each rank and group that are compared by their places: what is other than on
#: other ranks moves all that come later.
LATEST = 200


@dataclass(frozen=True)
class Cause:
    """Ranks at fault, and what others wait in because of them."""

    fault: Fault
    culprits: tuple[int, ...]
    #: What others wait in because of the culprits, one for each culprit and op, the
    #: first op first.
    waits: tuple[Wait, ...]
    difference: Difference | None = None
    #: Who wait for each other, each for the next one: a rank, or those in one op.
    cycle: tuple[tuple[Wait, ...], ...] = ()
    #: The culprits left no records.
    unrecorded: bool = False


@dataclass
class Picture:
    """All groups together: waits, pairs of sends and receives, and differences."""

    evidence: Evidence
    scenes: list[GroupScene]
    stale: frozenset[int]
    #: Seconds: an op that is younger hangs on no account.
    stall: float = 0.0
    waits: list[Wait] = field(default_factory=list)
    #: What ranks wait in unless it is over: nothing follows from these.
    doubtful: list[Wait] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @classmethod
    def of(cls, evidence: Evidence, stall: float) -> Picture:
        """Return what the rules look at; an op of `stall` seconds hangs."""
        scenes = scenes_of(evidence)
        pairs_of = [Pairs(scene) for scene in scenes]
        read_earlier = frozenset[int]()
        if not evidence.at_one_moment:
            read_earlier = stale_ranks(scenes).union(*(one.stale() for one in pairs_of))
        self = cls(evidence, scenes, read_earlier, stall)
        gone = [rank for rank, one in evidence.ranks.items() if one.has_ended]
        for scene, pairs in zip(scenes, pairs_of, strict=True):
            waits, matches = pairs.waits(self.stale, gone)
            differing = _of_pairs(pairs, matches)
            # Both sides of what is over are alike.
            unlike = [id(op) for one in differing for op in one.ops.values()]
            for wait in pairs.doubtful:
                (waits if id(wait.op) in unlike else self.doubtful).append(wait)
            self.waits += [*scene.waits(self.stale), *waits]
            difference = first_difference(scene, self.stale)
            if difference is not None:
                self.differences.append(difference)
            self.differences += differing
        self.waits = self._that_hang(self.waits)
        self.doubtful = self._that_hang(self.doubtful)
        return self

    def _that_hang(self, waits: Iterable[Wait]) -> list[Wait]:
        return [
            wait
            for wait in waits
            if not self._is_young(wait) and not self.rank(wait.rank).has_left
        ]

    def _is_young(self, wait: Wait) -> bool:
        one = self.evidence.ranks[wait.rank]
        if one.read_ns is None or (self.evidence.final and not wait.is_full):
            return False
        op = wait.op
        begun = None if op is None else op.started_ns or op.created_ns
        age = math.inf if begun is None else one.read_ns - begun
        # One that has timed out is as old as it can be.
        if op is not None and op.timeout and age >= 0.9e9 * op.timeout:
            return False
        # Issued long before, it waits for its turn while the rank goes on.
        return age < self.stall * 1e9 or self.was_active(wait.rank)

    def was_active(self, rank: int) -> bool:
        """Return whether `rank` is known to have gone on just before it was read."""
        one = self.rank(rank)
        if one.read_ns is None:
            return False
        return one.read_ns - (one.active_ns or 0) < self.stall * 1e9

    def rank(self, rank: int) -> RankEvidence:
        return self.evidence.rank(rank)

    @cached_property
    def callers(self) -> Callers:
        """Which callers a text has to name."""
        ranks = self.evidence.ranks.values()
        ops = (op for one in ranks for found in one.groups.values() for op in found.ops)
        return Callers(chain((one.location for one in ranks), (op.line for op in ops)))

    @cached_property
    def program_places(self) -> dict[object, dict[int, object]]:
        """The place of each op among all that a rank has issued, and the op at each.

        An op has one place on the ranks that run the same program: those that have
        groups of the same names, and the same place where they may send and receive.
        """
        # Dumps of active ops alone do not tell of sends and receives that are over.
        told = {one.group.name for one in self.scenes if one.known}
        p2p = {one.name for one in self.evidence.groups if one.name not in told}
        p2p |= {
            scene.group.name
            for scene in self.scenes
            if scene.has_p2p or not all(map(_lists_p2p, scene.known.values()))
        }
        programs: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
        for group in self.evidence.groups:
            for place, rank in enumerate(group.ranks):
                own = place if group.name in p2p else 0
                programs[rank].append((group.name, len(group.ranks), own))
        found: dict[object, dict[int, object]] = defaultdict(dict)
        for scene in self.scenes:
            for rank, known in scene.known.items():
                if not self.rank(rank).counts_all:
                    continue
                program = (*sorted(programs[rank]),)
                # Of a batch, whose ops share a number, the last one.
                last = {(op.is_p2p, op.seq): op.order for op in known.ops[-LATEST:]}
                for op, order in last.items():
                    found[program, scene.group.name, op][rank] = order
                    found[program, order][rank] = scene.group.name, op
        return found

    def is_idle(self, rank: int) -> bool:
        """Return whether `rank`, of which no end is known, was in no op when read."""
        return self.rank(rank).fate is None and self.is_out(rank)

    def is_out(self, rank: int) -> bool:
        """Return whether `rank` is known to be in no op."""
        one = self.rank(rank)
        return one.recorded and all(
            found.lists_all_in_flight and not any(op.in_flight for op in found.ops)
            for found in one.groups.values()
        )

    def is_unexplained(self, rank: int) -> bool:
        """Return whether no error and no cell tells why `rank` does not come."""
        one = self.rank(rank)
        return not (one.exception or (one.last_cell_exit and not one.has_ended_well))

    def may_wait(self, rank: int) -> bool:
        """Return whether `rank` waits in its last op unless that is over."""
        last = self.last_order(rank)
        return any(
            one.rank == rank and one.op is not None and one.op.order == last
            for one in self.doubtful
        )

    def has_begun(self, rank: int) -> bool:
        """Return whether `rank` is known to have issued an op."""
        counts = any(scene.issued.get(rank) for scene in self.scenes)
        return counts or self.last_order(rank) >= 0

    def last_order(self, rank: int) -> int:
        """Return the place of the last op that `rank` issued, -1 without one."""
        groups = self.rank(rank).groups.values()
        return max((one.ops[-1].order for one in groups if one.ops), default=-1)


def _lists_p2p(found: GroupEvidence) -> bool:
    return found.lists_all or found.lists_all_p2p


def _of_pairs(pairs: Pairs, matches: Iterable[Match]) -> list[Difference]:
    found: dict[tuple[int, ...], Difference] = {}
    for match in matches:
        ends = (match.sender, match.receiver)
        certain = all(pairs.known[rank].lists_all for rank in ends)
        difference = difference_of_pair(match, certain)
        if difference is not None:
            found.setdefault(difference.culprits, difference)
    return list(found.values())


def issue_order(wait: Wait) -> tuple[int, int]:
    """Return a key that sorts the waits of a rank as it issued their ops."""
    return (wait.op.order if wait.op is not None else 1 << 62), wait.seq
