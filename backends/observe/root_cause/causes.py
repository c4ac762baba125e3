"""The rules: which ranks or ops are the cause, and which only wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..evidence import Evidence, Group, RankEvidence
from ..verdicts import Fault
from .differences import Difference, difference_of_pair, first_difference
from .graph import final_components, shortest_cycle
from .pairs import Match, Pairs
from .scene import GroupScene, Wait, scenes_of, stale_ranks

__all__ = ["Cause", "Picture", "find_causes"]

#: Seconds: an op that is younger hangs on no account.
YOUNG = 2.0


@dataclass(frozen=True)
class Cause:
    """Ranks at fault, and what others wait in because of them."""

    fault: Fault
    culprits: tuple[int, ...]
    #: What others wait in because of the culprits, one for each culprit and op, the
    #: first op first.
    waits: tuple[Wait, ...]
    difference: Difference | None = None
    #: Ranks that wait for each other, each for the next one.
    cycle: tuple[Wait, ...] = ()
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
    def of(cls, evidence: Evidence) -> Picture:
        """Return what the rules look at."""
        scenes = scenes_of(evidence)
        self = cls(evidence, scenes, stale_ranks(scenes))
        for scene in scenes:
            pairs = Pairs(scene)
            waits, matches = pairs.waits(self.stale)
            self.waits += [*scene.waits(self.stale), *waits]
            difference = first_difference(scene, self.stale)
            if difference is not None:
                self.differences.append(difference)
            self.differences += _of_pairs(pairs, matches)
        self.waits = [wait for wait in self.waits if not self._is_young(wait)]
        return self

    def _is_young(self, wait: Wait) -> bool:
        read = self.evidence.ranks[wait.rank].read_ns
        if read is None or wait.op is None or wait.op.created_ns is None:
            return False
        return read - wait.op.created_ns < YOUNG * 1e9

    def rank(self, rank: int) -> RankEvidence:
        """Return what is known of a rank."""
        return self.evidence.ranks.get(rank) or RankEvidence(rank)

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


def find_causes(picture: Picture) -> list[Cause]:
    """Return the causes, the one that explains most first; ``[]``: nothing hangs."""
    if not picture.waits and not picture.differences:
        return []
    strong = [one for one in picture.differences if not one.weak]
    causes = [_of_difference(one, picture) for one in _first_of_each(strong, picture)]
    blamed = {rank for cause in causes for rank in cause.culprits}
    lags = _lags(picture, blamed)
    causes += lags
    blamed |= {rank for cause in lags for rank in cause.culprits}
    causes += _sinks(picture, blamed, bool(causes))
    if not causes:
        weak = [one for one in picture.differences if one.weak]
        causes = [_of_difference(one, picture) for one in weak[:1]]
    return causes or _in_turn(picture)


# -- rule 1: differences ---------------------------------------------------------


def _first_of_each(
    differences: Sequence[Difference], picture: Picture
) -> list[Difference]:
    """Return the first difference of each set of culprits; others follow from it."""
    found: list[Difference] = []
    for one in sorted(differences, key=lambda one: (one.op.order, one.seq)):
        touched = {rank for known in found for rank in known.culprits}
        if touched.isdisjoint(one.culprits):
            found.append(one)
    return found


def _of_difference(one: Difference, picture: Picture) -> Cause:
    waits = tuple(
        wait
        for wait in picture.waits
        if wait.group == one.group and wait.rank in one.ops
        if wait.seq == one.seq or wait.is_p2p
    )
    return Cause(one.fault, one.culprits, waits, one)


# -- rule 2: ranks that lag ------------------------------------------------------


def _lags(picture: Picture, blamed: set[int]) -> list[Cause]:
    """Return ranks whose ops do not complete although they have for other ranks."""
    behind: dict[int, list[Wait]] = defaultdict(list)
    for wait in picture.waits:
        if wait.ahead and not wait.is_p2p and wait.rank not in blamed:
            behind[wait.rank].append(wait)
    explained = {
        wait.rank
        for wait in picture.waits
        if not wait.unsure and any(rank not in behind for rank in wait.absent)
    }
    first = {
        rank: min(waits, key=_order)
        for rank, waits in behind.items()
        if rank not in explained
    }
    return [
        Cause(Fault.EXECUTION_HANG, tuple(sorted(ranks)), waits)
        for ranks, waits in _alike(first)
    ]


def _order(wait: Wait) -> tuple[int, int]:
    return (wait.op.order if wait.op is not None else 1 << 62), wait.seq


def _alike(waits: Mapping[int, Wait]) -> list[tuple[list[int], tuple[Wait, ...]]]:
    """Return ranks whose op has one name, in groups of one name, together."""
    sets: dict[tuple[str, str], list[int]] = {}
    for rank, wait in sorted(waits.items()):
        sets.setdefault((wait.group.name, wait.name), []).append(rank)
    return [(ranks, tuple(waits[rank] for rank in ranks)) for ranks in sets.values()]


# -- rules 3 and 4: for whom everybody waits --------------------------------------


def _sinks(picture: Picture, blamed: set[int], has_cause: bool) -> list[Cause]:
    edges: dict[int, set[int]] = defaultdict(set)
    awaited: dict[int, list[Wait]] = defaultdict(list)
    differ = {(one.group, one.seq) for one in picture.differences}
    held_back = _held_back(picture)
    for wait in picture.waits:
        targets = wait.absent
        told = wait.place in held_back or (wait.group, wait.seq) in differ
        if not targets and not told and _is_telling(wait, picture):
            targets = wait.unknown
        if wait.unsure and wait.rank in blamed:
            # It may be over on the other side, and only this one has stopped.
            continue
        for rank in targets:
            if rank != wait.rank:
                edges[wait.rank].add(rank)
                awaited[rank].append(wait)
    waiting = {wait.rank for wait in picture.waits}
    for rank in [one for one in edges if picture.rank(one).death is not None]:
        del edges[rank]
    free: dict[int, list[Wait]] = {}
    causes: list[Cause] = []
    for members in final_components(edges):
        if not blamed.isdisjoint(members):
            continue
        if len(members) > 1:
            inside = [
                wait
                for wait in picture.waits
                if wait.rank in members
                and not {*wait.absent, *wait.unknown}.isdisjoint(members)
            ]
            causes.append(_cycle(members, edges, inside))
        elif members[0] in waiting and picture.rank(members[0]).death is None:
            # It is in an op that all ranks are in, or of which little is known.
            continue
        else:
            free[members[0]] = awaited[members[0]]
    known = {rank: waits for rank, waits in free.items() if _has_facts(rank, picture)}
    if not known and not causes and not has_cause:
        known = free
    elif not has_cause:
        held = {*edges, *known, *blamed}
        for rank, waits in free.items():
            if rank not in known and not _may_wait(rank, waits, held, picture):
                known = {**known, rank: waits}
    return causes + _absences(known, picture)


def _may_wait(
    rank: int, waits: Sequence[Wait], held: set[int], picture: Picture
) -> bool:
    """Return whether `rank`, of which nothing is known, may itself wait for others.

    It may wait in a group with a rank that does not go on either: for the first op
    there that is not over. Not so if those who wait for it have their own op of that
    kind and number after the one in which they wait, or in the same group: it would
    have come past that one, too.
    """
    scenes = {scene.group: scene for scene in picture.scenes}
    waiting = {wait.rank for wait in waits}
    for group, scene in scenes.items():
        if (
            rank not in group.ranks
            or not waiting.isdisjoint(group.ranks)
            or held.isdisjoint({*group.ranks} - {rank})
        ):
            continue
        following = max(scene.completed.values(), default=0) + 1
        if not scene.has_p2p and any(
            _comes_after(following, group, wait, scenes) for wait in waits
        ):
            continue
        return True
    return False


def _comes_after(
    seq: int, group: Group, wait: Wait, scenes: Mapping[Group, GroupScene]
) -> bool:
    """Return whether the rank of `wait` issues `seq`, in its like of `group`, later."""
    if wait.is_p2p or wait.op is None:
        return False
    for other, scene in scenes.items():
        if other.name == group.name and wait.rank in other.ranks:
            op = scene.op(wait.rank, seq)
            if op is not None:
                return op.order > wait.op.order
            return scene.issued.get(wait.rank, seq) < seq
    return False


def _held_back(picture: Picture) -> set[tuple[Group, int, str]]:
    """Return ops that a rank has issued and not come to: it is in an earlier one.

    The earlier one may be what holds the others, too. A send may go on by itself.
    """
    first: dict[int, Wait] = {}
    found = set()
    for wait in sorted(picture.waits, key=_order):
        if wait.rank in first:
            found.add(wait.place)
        elif wait.name != "send":
            first[wait.rank] = wait
    return found


def _is_telling(wait: Wait, picture: Picture) -> bool:
    """Return whether it is likely that the ranks of which nothing is known are late.

    All others are in. A minority without records may be what ended the job; a
    majority is rather a part of the files that is not here.
    """
    if wait.ahead or not picture.stale.isdisjoint(wait.unknown):
        return False
    if wait.is_p2p:
        recorded = [one for one in picture.evidence.ranks.values() if one.recorded]
        size = picture.evidence.world_size or len(recorded)
        return 2 * len(recorded) >= size
    return 2 * len(wait.unknown) <= len(wait.group.ranks)


def _has_facts(rank: int, picture: Picture) -> bool:
    one = picture.rank(rank)
    return one.recorded or one.death is not None or one.exception is not None


def _absences(free: Mapping[int, Sequence[Wait]], picture: Picture) -> list[Cause]:
    sets: dict[tuple[Fault, bool, str, str], dict[int, list[Wait]]] = {}
    for rank, waits in sorted(free.items()):
        first = _missed_first(rank, waits, picture)
        one = picture.rank(rank)
        fault = Fault.MISSING_RANKS
        if one.death is not None:
            fault = Fault.RANK_DEAD
        elif one.location is not None and one.exception is None and not one.has_left:
            fault = Fault.RANK_BUSY_ELSEWHERE
        key = fault, not one.recorded, first.group.name, first.name
        rest = [wait for wait in waits if wait is not first]
        sets.setdefault(key, {})[rank] = [first, *rest]
    causes = []
    for (fault, unrecorded, *_), found in sets.items():
        firsts = [waits[0] for waits in found.values()]
        rest = [wait for waits in found.values() for wait in waits[1:]]
        waits = tuple({id(wait): wait for wait in [*firsts, *rest]}.values())
        causes.append(Cause(fault, tuple(found), waits, unrecorded=unrecorded))
    return sorted(causes, key=lambda one: (one.unrecorded, -len(one.waits)))


def _missed_first(rank: int, waits: Sequence[Wait], picture: Picture) -> Wait:
    """Return that of the ops which wait for `rank` that it would have issued first.

    Ranks that run the same program count their ops alike: the op whose place is next
    after the rank's last one is the one. A send or receive has another place on its
    other side: it is the first one if there is a gap before all others.
    """
    following = picture.last_order(rank) + 1

    def key(wait: Wait) -> tuple[int, int, int, int]:
        order = wait.op.order if wait.op is not None else 1 << 62
        if wait.is_p2p:
            return 1, 0, wait.seq, wait.rank
        gap = order - following
        return (0 if gap == 0 else 2), abs(gap), len(wait.group.ranks), wait.rank

    if following == 0:
        # Its records hold nothing: the waiting ranks' own order is all there is.
        # The other side of a send counts its ops otherwise.
        return min(waits, key=lambda wait: (wait.is_p2p, _order(wait), wait.rank))
    return min(waits, key=key)


def _cycle(
    members: Sequence[int], edges: Mapping[int, Iterable[int]], inside: Sequence[Wait]
) -> Cause:
    """Return ranks that wait for each other in the ops `inside` as one cause."""
    ring = shortest_cycle(members, edges)
    ordered = sorted(inside, key=_order)
    told = []
    for place, rank in enumerate(ring):
        following = ring[(place + 1) % len(ring)]
        told.append(
            next(
                wait
                for wait in ordered
                if wait.rank == rank
                and following in (*wait.absent, *wait.unknown, *_others(wait))
            )
        )
    sides: dict[tuple[Group, int, str], set[int]] = defaultdict(set)
    for wait in inside:
        sides[wait.place].add(wait.rank)
    culprits: Iterable[int] = members
    sizes = sorted(map(len, sides.values()))
    if any(wait.is_p2p for wait in inside):
        culprits = ring
    elif len(sides) == 2 and sizes[0] < sizes[1]:
        # Most ranks are in one op: those in the other have another order.
        culprits = min(sides.values(), key=len)
    return Cause(
        Fault.ORDER_MISMATCH,
        tuple(sorted(culprits)),
        tuple(told),
        cycle=tuple(told),
    )


# -- rules 4 and 5, where all ranks have issued what others wait in -----------------


def _in_turn(picture: Picture) -> list[Cause]:
    """Return cycles and hangs of ops that all ranks have issued.

    A rank may issue ops long before they run, one after the other: the one that it is
    in is its first one, and who is in an earlier op is not in this one yet.
    """
    current = _current(picture)
    edges: dict[int, set[int]] = {}
    for rank, waits in current.items():
        found = edges.setdefault(rank, set())
        for wait in waits:
            for other in _others(wait):
                there = current.get(other)
                if there and not any(_is_same(wait, one) for one in there):
                    found.add(other)
            found |= {*wait.absent, *wait.unknown} - {rank}
    causes: list[Cause] = []
    full: dict[tuple[Group, int, str], list[Wait]] = defaultdict(list)
    for members in final_components(edges):
        if len(members) > 1:
            inside = [wait for rank in members for wait in current.get(rank, ())]
            causes.append(_cycle(members, edges, inside))
        else:
            for wait in current.get(members[0], ())[:1]:
                if wait.is_full:
                    full[wait.place].append(wait)
    if causes:
        return causes
    for waits in full.values():
        ranks = {one for wait in waits for one in (wait.rank, *_others(wait))}
        causes.append(Cause(Fault.EXECUTION_HANG, tuple(sorted(ranks)), tuple(waits)))
    return causes


def _current(picture: Picture) -> dict[int, list[Wait]]:
    """Return the op that each rank is in; of a batch, all of its ops."""
    found: dict[int, list[Wait]] = defaultdict(list)
    for wait in sorted(picture.waits, key=_order):
        found[wait.rank].append(wait)
    current = {}
    for rank, waits in found.items():
        started = [one for one in waits if one.op and one.op.state == "started"]
        first = (started or waits)[0]
        batch = first.op.batch if first.op is not None else None
        current[rank] = [
            one
            for one in waits
            if one is first
            or (batch is not None and one.op is not None and one.op.batch == batch)
        ]
    return current


def _others(wait: Wait) -> tuple[int, ...]:
    if not wait.is_p2p:
        return tuple(one for one in wait.group.ranks if one not in wait.ahead)
    peer = wait.op.peer if wait.op is not None else None
    return () if peer is None or wait.ahead else (peer,)


def _is_same(wait: Wait, one: Wait) -> bool:
    """Return whether `one`, of another rank, is the same op as `wait`."""
    if wait.is_p2p:
        return wait.other is not None and wait.other is one.op
    return wait.place == one.place
