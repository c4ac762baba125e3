"""How ranks are late in many ops: what chance and a scheduler do not explain."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..rank_sets import group_by
from .joint_ops import Clocks, Moment

__all__ = [
    "MOSTLY",
    "NOTABLE",
    "Pattern",
    "Shape",
    "bursts_agree",
    "enough_bursts",
    "hosts_of",
    "outlasts_others",
    "shape_of",
]

#: How likely chance may give a pattern that is named, at one look; and how much of the
#: way from its usual part to all ops a pattern has to go: a scheduler may keep a rank
#: behind for many ops in a row, although not in nearly all of them. Half is enough for
#: ranks that stand out in each op: then noise alone has others last now and then.
CHANCE = 4e-6
STEADY = 0.75
HALF = 0.5
#: The same of the turns of all but one of those who take turns, and of bursts.
BESIDE = 2e-3
#: A scheduler may keep a rank behind for so few ops, or for so many ns. Where these are
#: all there is, a rank has to be late by 1.5 ms, and in each op to take half of what it
#: usually takes more than the others; beyond the first of them, in all but one of so
#: many.
FEW = 100
SHORT = 1_000_000_000
OF_FEW = 1_500_000
FIRM, EXCEPT = 20, 8
FLOOR = 0.5
#: Ops that are needed to see that a rank takes longer where it seldom is the last, and
#: the part of them in which each other rank is nearly as fast as most.
MANY, OFTEN = 40, 0.25
#: By how many times as long ranks have to be late as others were for a while.
OUTLASTS = 5
#: Deviation over mean of what a slow link takes.
REGULAR = 0.4
#: By how many times as much one may be late in its turn as another one in its own.
ALIKE = 4
#: By how many times as much late ranks differ from the others as any others do.
APART = 2
#: The part of the late entries that a reason has to explain.
MOSTLY = 0.6
#: How many times as often as any other a rank has to be late at one of the turns.
CLEAR = 2
#: Nanoseconds by which ranks have to be late in the middle to be named.
NOTABLE = 500_000

#: Nanoseconds, of each rank in each op or of one rank.
_Times = NDArray[Any]


class Pattern(enum.Enum):
    """How ranks are late."""

    #: The same ranks are late each time.
    STEADY = "late rank"
    #: They are all ranks of one host, or of several.
    HOST = "late host"
    #: A rank takes longer each time, but noise has others last more often.
    SLOW = "slow rank"
    #: Each time another rank is late, in turns.
    TURNS = "late by turns"
    #: The ranks enter one after the other, the same one last each time.
    UNEVEN = "uneven work"
    #: A rank leaves the op before late, and is late for that reason.
    LEAVES_LATE = "late to leave"


@dataclass(frozen=True)
class Shape:
    """A pattern, the ranks in it, and the ops that have it with their late ranks."""

    pattern: Pattern
    ranks: tuple[int, ...]
    hits: Sequence[tuple[Moment, frozenset[int]]]


def shape_of(ops: Sequence[Moment], ranks: int, clocks: Clocks) -> Shape | None:
    """Return what is certain about `ops` of one line of a group of so many ranks."""
    return _by_arrival(ops, ranks, clocks) or _by_own_time(ops, ranks, clocks)


def _by_own_time(ops: Sequence[Moment], ranks: int, clocks: Clocks) -> Shape | None:
    """Return the ranks that take longer in each op, if each other often does not.

    Noise only adds: it is not there each time, so that the least that a rank takes
    tells what its work is. Few ops tell it only of those that are last in most.
    """
    few = len(ops) < MANY
    members = [*ops[0].op]
    own = np.array([[one.op[rank].own for one in ops] for rank in members])
    fast = _fast(own)
    if few:
        # Many steps may be of unequal lengths for all. Of few, the middle one tells
        # what a step takes although noise has delayed all others in some.
        fast = np.median(fast, axis=1, keepdims=True)
    more = own - fast
    middle = np.median(more, axis=1)
    slow = (middle >= OF_FEW) & (_least(more) >= FLOOR * middle)
    late = frozenset(rank for rank, one in zip(members, slow, strict=True) if one)
    if not 0 < len(late) <= ranks // 2 or (ranks > 2 and not _apart(ops, [late])):
        return None
    hits = [(one, late) for one in ops if one.last(len(late)) == late]
    if len(hits) < (HALF * len(ops) if few else 1):
        return None
    if _why(hits, clocks) is not Pattern.STEADY:
        return None
    if not all(
        _longer_than(own[~slow] - fast[at], more[at]) for at in slow.nonzero()[0]
    ):
        return None
    return Shape(Pattern.SLOW, tuple(sorted(late)), hits)


def _fast(own: _Times) -> _Times:
    """Return what the fast ones beside each rank take in each op.

    Of many ranks the fastest one tells nothing: all others take longer than it.
    """
    place = (len(own) - 2) // 4
    fast, next_one = np.partition(own, (place, place + 1), axis=0)[place : place + 2]
    return np.where(own <= fast, next_one, fast)


def _longer_than(others: _Times, its: _Times) -> bool:
    """Return whether each of `others` often takes less, and none of it by chance.

    If all were alike, the least times of all would hardly be those of others alone.
    """
    half = FLOOR * np.median(its)
    if ((others < half).sum(axis=1) < OFTEN * its.size).any():
        return False
    of, below = others.size, int((others < _least(its)).sum())
    log = math.lgamma(of + 1) - math.lgamma(of - below + 1)
    log -= math.lgamma(of + its.size + 1) - math.lgamma(of + its.size - below + 1)
    return (1 + len(others)) * math.exp(log) <= CHANCE


def _by_arrival(ops: Sequence[Moment], ranks: int, clocks: Clocks) -> Shape | None:
    # The longest gap may be elsewhere where noise has delayed a rank, too: the last
    # ranks, so many as may be late.
    views = [[one.late for one in ops]]
    views += [
        [one.last(count) for one in ops]
        for count in range(1, min((ranks + 1) // 2, 3) + 1)
    ]
    periods = range(1, min(2 * ranks, len(ops) // 2) + 1)
    for period, steady in (*((one, STEADY) for one in periods), (1, HALF)):
        for late in views:
            turns = _turns(late, ranks, period, steady)
            if turns is None:
                continue
            hits = _hits(ops, late, turns)
            if period > 1 and not _alike(hits):
                continue
            pattern = _why(hits, clocks)
            few = len(ops) < FEW or _span(ops) < SHORT or steady < STEADY
            if few and pattern and not _stand_out(ops, turns, pattern):
                if steady < STEADY:
                    continue
                return None
            if pattern in (Pattern.STEADY, Pattern.HOST) and ranks > 2:
                second = _turns([one.last(2) - one.last(1) for one in ops], ranks, 1)
                if period == 1 and late is views[1] and second is not None:
                    if _apart(ops, [turns[0] | second[0]]):
                        # The last two are late, as the next view tells.
                        continue
                    pattern = Pattern.UNEVEN
                elif not _apart(ops, turns):
                    continue
            if pattern is Pattern.STEADY and period > 1:
                pattern = Pattern.TURNS
            who = dict.fromkeys(rank for turn in turns for rank in sorted(turn))
            return pattern and Shape(pattern, tuple(who), hits)
    return None


def _apart(ops: Sequence[Moment], turns: Sequence[frozenset[int]]) -> bool:
    """Return whether those of `turns` take longer than all others by a step.

    Where each rank takes longer than the one before it, some are the last ones, too. A
    quarter of its ops tells what a rank takes: noise only adds.
    """
    for turn, late in enumerate(turns):
        its = ops[turn :: len(turns)]
        own = {
            rank: sorted(one.op[rank].own for one in its)[len(its) // 4]
            for rank in its[0].op
        }
        order = sorted(own, key=own.__getitem__)
        gaps = [own[later] - own[rank] for rank, later in pairwise(order)]
        gap = gaps.pop(-len(late))
        least = APART * max(gaps)
        if len(late) == 2 <= len(gaps):
            # They may be late by different amounts where the others are together.
            least = min(least, max(2 * APART * max(gaps[:-1]), gaps[-1]))
        if {*order[-len(late) :]} != late or gap < least:
            return False
    return True


def _span(ops: Sequence[Moment]) -> int:
    rank = next(iter(ops[0].op))
    return ops[-1].op[rank].left - ops[0].op[rank].left_before


def _turns(
    late: Sequence[frozenset[int]], ranks: int, period: int, steady: float = STEADY
) -> list[frozenset[int]] | None:
    """Return who is late each time, if it repeats after `period` ops and not by chance.

    The chance is bounded from above: each rank is as likely late as the others, and
    who is said to be late at each of the turns is chosen to fit.
    """
    usual = 1 / ranks
    phases = [late[phase::period] for phase in range(period)]
    turns, counts = list[frozenset[int]](), list[int]()
    for phase in phases:
        found = Counter(filter(None, phase))
        if not found:
            return None
        (those, count), *others = found.most_common(2)
        if period > 1 and any(count < CLEAR * one for _, one in others):
            # Whose turn it is would be noise's choice, since the other turns are clear.
            return None
        turns.append(those)
        counts.append(count)
    if sum(counts) < (usual + steady * (1 - usual)) * len(late):
        return None

    def chance(which: Sequence[int]) -> float:
        times, of = (
            sum(counts[one] for one in which),
            sum(len(phases[one]) for one in which),
        )
        return ranks ** len(which) * _at_least(times, of, usual)

    if period > 1:
        of_each = Counter(rank for those in turns for rank in those)
        if len({*of_each.values()}) > 1 or len({*map(len, turns)}) > 1:
            # Who takes turns has as many of them as the others, as pauses that each
            # rank makes on its own do not.
            return None
        # Who is late in nearly all of its turns takes none if the others' are noise.
        most = turns[counts.index(max(counts))]
        rest = [one for one, those in enumerate(turns) if those != most]
        if not rest or chance(rest) > BESIDE:
            return None
    return turns if chance(range(period)) <= CHANCE else None


def _at_least(times: int, of: int, p: float) -> float:
    """Return how likely something of chance `p` is, `times` or more often."""
    return sum(
        math.comb(of, k) * p**k * (1 - p) ** (of - k) for k in range(times, of + 1)
    )


def _hits(
    ops: Sequence[Moment],
    late: Sequence[frozenset[int]],
    turns: Sequence[frozenset[int]],
) -> list[tuple[Moment, frozenset[int]]]:
    return [
        (one, those)
        for n, (one, those) in enumerate(zip(ops, late, strict=True))
        if those == turns[n % len(turns)]
    ]


def _alike(hits: Sequence[tuple[Moment, frozenset[int]]]) -> bool:
    """Return whether each is late by as much in its turn: else one is, and noise is."""
    by = group_by(hits, lambda hit: hit[1])
    middles = [median(one.by(late) for one, _ in its) for late, its in by.items()]
    return max(middles) <= ALIKE * min(middles)


def _stand_out(
    ops: Sequence[Moment], turns: Sequence[frozenset[int]], pattern: Pattern
) -> bool:
    """Return whether those of `turns` take as much more time in each op, and enough.

    Work or a sleep takes its time in each step. What a scheduler takes is now more and
    now next to nothing, also while it keeps the same rank behind.
    """

    def parts(by_step: bool) -> _Times:
        found = []
        for turn, late in enumerate(turns):
            its = ops[turn :: len(turns)]
            if pattern is Pattern.LEAVES_LATE:
                more = np.array([one.by(late) for one in its])
            else:
                own, fast = np.array([one.own(late) for one in its]).T
                more = own - (fast if by_step else np.median(fast))
            usual = np.median(more)
            if usual < OF_FEW:
                return np.zeros(1)
            found.append(more / usual)
        return np.concatenate(found)

    return any(_least(parts(by_step)) >= FLOOR for by_step in (True, False))


def _least(them: _Times) -> Any:
    """Return the least in each row; of many, that of all but a few exceptions."""
    return np.sort(them)[..., max(0, them.shape[-1] - FIRM) // EXCEPT]


def outlasts_others(ops: Sequence[Moment], shape: Shape, count: int) -> bool:
    """Return whether `shape` has lasted for `count` of `ops`, much longer than others.

    Where other ranks were late for a while and then were not, these may be, too.
    """
    late = frozenset(shape.ranks)
    least = median(one.by(those) for one, those in shape.hits) / ALIKE
    lasted: dict[frozenset[int], int] = {}
    for one in ops:
        if one.late and late.isdisjoint(one.late) and one.by(one.late) >= least:
            lasted.setdefault(one.late, 0)
        for those in lasted:
            lasted[those] += 1 if those == one.late else -2
            if OUTLASTS * lasted[those] > count:
                return False
        lasted = {those: n for those, n in lasted.items() if n > 0}
    return True


def _why(
    hits: Sequence[tuple[Moment, frozenset[int]]], clocks: Clocks
) -> Pattern | None:
    """Return why the ranks of `hits` are late, if it is known and worth a word."""

    def mostly(holds: Callable[[Moment, frozenset[int]], bool]) -> bool:
        return sum(holds(*one) for one in hits) >= MOSTLY * len(hits)

    by = median(one.by(late) for one, late in hits)
    if by < max(NOTABLE, 4 * clocks.error):
        return None
    if mostly(lambda one, late: one.excused(late)):
        return None
    if mostly(lambda one, late: 2 * one.excess(late) >= one.by(late)):
        one, late = hits[0]
        same = all(those == late for _, those in hits)
        whole = same and hosts_of(late, one, clocks)
        return Pattern.HOST if whole else Pattern.STEADY
    links = len({clocks.hosts.get(rank, "") for rank in hits[0][0].op}) > 1
    if (links and clocks.exact) and mostly(
        lambda one, late: 2 * one.left_late(late, clocks) >= one.by(late)
    ):
        # A slow link takes much the same time each time. On a loaded machine the rank
        # that an algorithm lets go last is late by what the scheduler takes: within a
        # host, where it may well be the same each time, nothing else is slow.
        left = [one.left_late(late, clocks) for one, late in hits]
        if pstdev(left) <= REGULAR * fmean(left):
            return Pattern.LEAVES_LATE
    return None


def enough_bursts(ranks: int) -> int:
    """Return in how many bursts the same ranks are not late by chance."""
    return 1 + math.ceil(math.log(1 / BESIDE, ranks))


def bursts_agree(firm: Sequence[Moment], shape: Shape) -> bool:
    """Return whether an op of each burst has the same late ranks, which stand out."""
    late = frozenset(shape.ranks)
    if len(firm) < enough_bursts(len(firm[0].op)) or any(
        one.late != late for one in firm
    ):
        return False
    return _stand_out(firm, [late], shape.pattern)


def hosts_of(late: frozenset[int], one: Moment, clocks: Clocks) -> tuple[str, ...]:
    """Return the hosts whose ranks, several on each, `late` are; else none."""
    hosts = group_by(one.op, lambda rank: clocks.hosts.get(rank, ""))
    found = {host: those for host, those in hosts.items() if late.issuperset(those)}
    if frozenset().union(*found.values()) != late or min(map(len, found.values())) < 2:
        return ()
    return tuple(sorted(found))
