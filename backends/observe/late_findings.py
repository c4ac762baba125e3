"""What is certain about the ops of one line of a group: who is late, and the cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ..groups.key import GroupKey
from ..rank_sets import name_ranks
from .joint_ops import Clocks, Moment
from .late_patterns import (
    MOSTLY,
    NOTABLE,
    Pattern,
    Shape,
    bursts_agree,
    enough_bursts,
    hosts_of,
    outlasts_others,
    shape_of,
)

__all__ = ["PAUSE", "LateFinding", "bursts_of", "first_finding", "late_lines"]

#: The part of their time that the others have to wait.
WORTH = 0.03
#: The patterns in which it is of interest where the late ranks are meanwhile.
LOCATED = frozenset({Pattern.STEADY, Pattern.HOST, Pattern.SLOW, Pattern.TURNS})
#: An op that takes this many times as long as most has a pause before it, as between
#: two cells of a notebook.
PAUSE = 10
#: Ops of a group in a step, at most, of which one may have the waiting.
IN_A_STEP = 32
#: Ops without which nothing is certain.
LEAST = 20

_SENTENCES = {
    Pattern.STEADY: "{who} {are} last to enter {ops}{elsewhere}, {times} of {of} times",
    Pattern.HOST: "{who} ({hosts}) are last to enter {ops}{elsewhere}, {times} of {of} "
    "times",
    Pattern.SLOW: "{who} {take} longer than the others before each {ops}{elsewhere}, "
    "and {are} last to enter {times} of {of} times",
    Pattern.TURNS: "{who} take turns in being last to enter {ops}, {times} of {of} "
    "times",
    Pattern.UNEVEN: "the ranks enter {ops} one after the other, {who} last {times} of "
    "{of} times{elsewhere}",
    Pattern.LEAVES_LATE: "{who} {are} last to enter {ops}, {times} of {of} times, "
    "after leaving the one before late: what comes in is slow, not the work between",
}


@dataclass(frozen=True)
class LateFinding:
    """What is certain about the ops of one line of a group; as text, a sentence."""

    pattern: Pattern
    group: GroupKey
    #: The ranks that are late, in the order of their turns if they take turns.
    ranks: tuple[int, ...]
    op: str
    #: Where the others enter, and where the late ones do: ``cell 7 line 3``.
    line: str
    late_line: str
    #: In how many of how many ops.
    times: int
    of: int
    #: Seconds that the others wait each time, and the part of their time that it is.
    wait: float
    share: float
    #: Seconds by which the clocks of hosts may differ; 0 where the ranks share one.
    clock_error: float = 0.0
    #: It is so in one op of this many at the line: of DDP's buckets, in the first one.
    each: int = 1
    #: The hosts of the late ranks, of `Pattern.HOST`.
    hosts: tuple[str, ...] = ()
    #: Whether it is by the events of GPUs.
    by_events: bool = False
    #: Rank → from when to when the others waited for it, in ns on its own clock.
    windows: Mapping[int, Sequence[tuple[int, int]]] = field(
        default_factory=dict, repr=False
    )
    #: From when to when these ops were, in ns on the clock of the group's first rank.
    span: tuple[int, int] = field(default=(0, 0), repr=False)
    #: Where the late ranks are meanwhile, if their stacks were sampled and it is known.
    meanwhile: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What two looks at the same thing have in common."""
        return self.pattern, self.group, frozenset(self.ranks), self.op, self.line

    def __str__(self) -> str:
        one = len(self.ranks) == 1
        elsewhere = ""
        if self.late_line and self.late_line != self.line:
            elsewhere = f", which {'it enters' if one else 'they enter'} at "
            elsewhere += self.late_line
        ops = self.op if self.each == 1 else f"one {self.op} in {self.each}"
        if self.line:
            ops += f" at {self.line}"
        said = _SENTENCES[self.pattern].format(
            who=name_ranks(self.ranks),
            are="is" if one else "are",
            take="takes" if one else "take",
            hosts=", ".join(self.hosts),
            times=self.times,
            of=self.of,
            ops=ops,
            elsewhere=elsewhere,
        )
        said += f": the others wait {_milliseconds(self.wait)} each time, "
        said += f"{self.share:.0%} of their time"
        if self.by_events:
            said += ", by the GPUs' events"
        if self.clock_error:
            within = _milliseconds(self.clock_error)
            said += f" (the clocks of the hosts agree within {within})"
        if self.meanwhile:
            said += f"; meanwhile {self.meanwhile}"
        return said


def late_lines(findings: Iterable[LateFinding]) -> list[str]:
    """Return a line for each finding: ``late rank: rank 2 is last to enter …``."""
    return [f"{one.pattern.value}: {one}" for one in findings]


def _share(
    ranks: Sequence[int],
    late: frozenset[int],
    steps: Sequence[Moment],
    ops: Sequence[Moment],
) -> float:
    """Return the part of all their time that `ranks` waited for `late` in `ops`.

    A step ends with one of `steps`: the ops after the one before belong to it. One that
    is much longer than most does not count.
    """
    waited, ends, sums = 0, {one.number for one in steps}, list[int]()
    for one in ops:
        if one.last(1) <= late:
            waited += sum(one.waits[rank] for rank in ranks)
        if one.number in ends:
            sums.append(waited)
            waited = 0
    times = [
        [one.op[rank].left - before.op[rank].left for rank in ranks]
        for before, one in pairwise(steps)
    ]
    usual = median(map(max, times))
    kept = [n for n, took in enumerate(times) if max(took) <= PAUSE * usual]
    spent = sum(sum(times[n]) for n in kept)
    return min(1.0, sum(sums[n + 1] for n in kept) / spent) if spent > 0 else 0.0


# -- what is certain --------------------------------------------------------------


def first_finding(
    ops: Sequence[Moment],
    counts: Iterable[int],
    key: GroupKey,
    op: str,
    line: str,
    clocks: Clocks,
) -> LateFinding | None:
    """Return what is certain about so many of the last ops of one line."""
    bursts = bursts_of(ops)
    firm = [max(burst, key=lambda one: sum(one.waits.values())) for burst in bursts]
    for series in _series(firm):
        for count in counts:
            last = series[-count:]
            if len(last) == count or len(last) > LEAST:
                shape = shape_of(last, len(key.ranks), clocks)
                all_ops = len(series) == len(ops)
                if shape is None or not outlasts_others(series, shape, len(last)):
                    continue
                if all_ops or shape.pattern in LOCATED:
                    each = 1 if all_ops else _ops_between(series, ops)
                    since = ops[ops.index(last[0]) :]
                    return _finding(shape, last, since, each, key, op, line, clocks)
    if LEAST > len(firm) < len(ops):
        # Few are enough if they all say the same, and their ops do.
        few = enough_bursts(len(key.ranks))
        last = [one for burst in bursts[-few:] for one in burst]
        shape = shape_of(last, len(key.ranks), clocks) if len(last) > LEAST else None
        ends = firm[-few:]
        if shape is not None and bursts_agree(ends, shape):
            shape = replace(shape, hits=[(one, one.late) for one in ends])
            each = round(len(last) / few)
            return _finding(shape, ends, last, each, key, op, line, clocks)
    return None


def _ops_between(series: Sequence[Moment], ops: Sequence[Moment]) -> int:
    """Return by how many of `ops` those of `series` follow each other, mostly.

    Noise makes one burst of two, or two of one, which the mean would have in it.
    """
    places = {one.number: place for place, one in enumerate(ops)}
    gaps = (places[b.number] - places[a.number] for a, b in pairwise(series))
    return round(median(gaps))


def bursts_of(ops: Sequence[Moment]) -> list[list[Moment]]:
    """Return the ops, in one list where no rank has waited between them.

    In a step whose ops are issued while the rank computes, as those of DDP, a rank that
    is late to the first one is late to the others for the same reason.
    """
    found: list[list[Moment]] = []
    waited: dict[int, int] = {}
    for one in ops:
        if not found or any(
            rank in waited and waited[rank] < entry.entered
            for rank, entry in one.op.items()
        ):
            found.append([])
            waited = {}
        found[-1].append(one)
        for rank, entry in one.op.items():
            if entry.waited:
                waited[rank] = min(entry.waited, waited.get(rank, entry.waited))
    return found


def _series(ops: Sequence[Moment]) -> Iterator[Sequence[Moment]]:
    """Yield the ops of a line; then those that have the waiting if it is one of each n.

    Of the parameters that a loop reduces one by one, a rank that works for longer is
    late to the first one alone.
    """
    yield ops
    costs = [(one.number, sum(one.waits.values())) for one in ops]
    most = MOSTLY * sum(cost for _, cost in costs)
    for period in range(2, min(IN_A_STEP, len(ops) // LEAST) + 1):
        by_place = defaultdict[int, int](int)
        for number, cost in costs:
            by_place[number % period] += cost
        place = max(by_place, key=by_place.__getitem__)
        if by_place[place] >= most > 0:
            series = [one for one in ops if one.number % period == place]
            if len(series) < len(ops):
                yield series


def _finding(
    shape: Shape,
    ops: Sequence[Moment],
    of_line: Sequence[Moment],
    each: int,
    key: GroupKey,
    op: str,
    line: str,
    clocks: Clocks,
) -> LateFinding | None:
    """Return the finding, if what the others wait is worth a word.

    `ops` are those in which they wait, one for each step; `of_line` all at their line
    since.
    """
    pattern, late = shape.pattern, frozenset(shape.ranks)
    turns = pattern is Pattern.TURNS
    others = [rank for rank in key.ranks if turns or rank not in late]
    share = _share(others, late, ops, of_line)
    if share < WORTH:
        return None
    waits = [
        fmean(wait for rank, wait in one.waits.items() if rank not in those)
        for one, those in shape.hits
    ]
    if median(waits) < NOTABLE:
        # Who is late keeps nobody: a few ops have all the waiting.
        return None
    lines = Counter(one.op[min(those)].line for one, those in shape.hits)
    return LateFinding(
        pattern,
        key,
        shape.ranks if turns else tuple(sorted(late)),
        op,
        line,
        "" if turns else lines.most_common(1)[0][0],
        len(shape.hits),
        len(ops),
        median(waits) / 1e9,
        share,
        clocks.error / 1e9,
        each,
        hosts_of(late, ops[-1], clocks) if pattern is Pattern.HOST else (),
        clocks.by_events,
        _windows(shape) if pattern in LOCATED and not clocks.by_events else {},
        (ops[0].op[key.ranks[0]].entered, ops[-1].op[key.ranks[0]].left),
    )


def _windows(shape: Shape) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for one, those in shape.hits:
        by = one.by(those)
        for rank in those:
            entry = one.op[rank]
            begins = max(entry.entered - by, entry.left_before)
            found.setdefault(rank, []).append((begins, entry.entered))
    return found


def _milliseconds(seconds: float) -> str:
    """Return ``9.1 ms``, ``41 ms``, ``2.5 s``."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.{1 if seconds < 0.01 else 0}f} ms"
