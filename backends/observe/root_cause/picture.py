"""What the rules look at: all groups together; and what they find."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from ..callers import Callers
from ..evidence import Evidence, RankEvidence
from ..verdicts import Fault
from .differences import Difference, difference_of_pair, first_difference
from .pairs import Match, Pairs
from .scene import GroupScene, Wait, scenes_of, stale_ranks

__all__ = ["Cause", "Picture", "issue_order"]


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
    waits: list[Wait] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @classmethod
    def of(cls, evidence: Evidence, stall: float) -> Picture:
        """Return what the rules look at; an op of `stall` seconds hangs."""
        scenes = scenes_of(evidence)
        pairs_of = [Pairs(scene) for scene in scenes]
        read_earlier = frozenset[int]()
        if not evidence.at_one_moment:
            read_earlier = stale_ranks(scenes).union(*(one.stale() for one in pairs_of))
        self = cls(evidence, scenes, read_earlier)
        gone = [rank for rank, one in evidence.ranks.items() if one.has_ended]
        for scene, pairs in zip(scenes, pairs_of, strict=True):
            waits, matches = pairs.waits(self.stale, gone)
            self.waits += [*scene.waits(self.stale), *waits]
            difference = first_difference(scene, self.stale)
            if difference is not None:
                self.differences.append(difference)
            self.differences += _of_pairs(pairs, matches)
        self.waits = [
            wait
            for wait in self.waits
            if not self._is_young(wait, stall) and not self.rank(wait.rank).has_left
        ]
        return self

    def _is_young(self, wait: Wait, stall: float) -> bool:
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
        return min(age, one.read_ns - (one.active_ns or 0)) < stall * 1e9

    def rank(self, rank: int) -> RankEvidence:
        """Return what is known of a rank."""
        return self.evidence.rank(rank)

    @cached_property
    def callers(self) -> Callers:
        """Which callers a text has to name."""
        ranks = self.evidence.ranks.values()
        ops = (op for one in ranks for found in one.groups.values() for op in found.ops)
        return Callers(chain((one.location for one in ranks), (op.line for op in ops)))

    def last_order(self, rank: int) -> int:
        """Return the place of the last op that `rank` issued, -1 without one."""
        groups = self.rank(rank).groups.values()
        return max((one.ops[-1].order for one in groups if one.ops), default=-1)


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
