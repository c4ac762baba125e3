"""The ranks of a report: what each one was doing, those that are alike in one row."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from rankscope.backends.observe.evidence import (
    Evidence,
    Group,
    IssuedOp,
    RankEvidence,
    SourceLine,
)
from rankscope.backends.rank_sets import group_by

from ..units import elapsed_text

__all__ = ["Doing", "RankRow", "all_ranks", "line_of_op", "rank_rows"]

#: The order of moods in the table: what matters is on top.
_MOODS = ("error", "warning", "working", "quiet", "unknown")


class Doing(NamedTuple):
    """What a rank was doing; equal for ranks that are alike."""

    #: ``error``: at fault; ``warning``: ended; ``working``: it waits; ``quiet``: it is
    #: in no op; ``unknown``: that is not known.
    mood: str
    state: str
    #: ``all_reduce #13``
    op: str = ""
    group: str = ""
    line: str = ""
    #: Why it ended, or what it had called there.
    detail: str = ""


class RankRow(NamedTuple):
    """Ranks that are alike."""

    ranks: tuple[int, ...]
    doing: Doing
    #: How long they had been in their op, each on its own clock: ``600 s``.
    waited: str = ""
    processes: tuple[str, ...] = ()


def all_ranks(evidence: Evidence) -> range:
    """Return every rank that the job has, as far as is known."""
    named = [*evidence.ranks, *(rank for one in evidence.groups for rank in one.ranks)]
    return range(max([evidence.world_size or 0, *(rank + 1 for rank in named)]))


def rank_rows(
    evidence: Evidence, culprits: Collection[int], waiting: Collection[int] = ()
) -> list[RankRow]:
    """Return the rows, those of ranks at fault first."""
    alike = group_by(
        all_ranks(evidence),
        lambda rank: _doing(
            evidence.ranks.get(rank), rank in culprits, rank in waiting
        ),
    )
    rows = []
    for doing, ranks in alike.items():
        known = [evidence.ranks[rank] for rank in ranks if rank in evidence.ranks]
        processes = [f"rank {one.rank}: {one.process}" for one in known if one.process]
        rows.append(RankRow(tuple(ranks), doing, _waited(known), tuple(processes)))
    return sorted(rows, key=lambda row: (_MOODS.index(row.doing.mood), row.ranks))


def _doing(one: RankEvidence | None, at_fault: bool, waits: bool) -> Doing:
    if one is None:
        return Doing("error" if at_fault else "unknown", "no evidence")
    found = _first_in_flight(one)
    group, op = found if found is not None else (None, None)
    line = one.location or line_of_op(one)
    mood, state = "quiet", "in no op"
    if op is not None:
        mood, state = "working", "waits"
    elif waits:
        mood, state = "working", "waited"
    elif not one.recorded:
        mood, state = "unknown", "op not known"
    detail = f"in {one.called}" if one.called else ""
    if one.exception is not None:
        mood, state, detail = "warning", "raised", one.exception
        line = one.exception_line or line
    if one.death is not None:
        mood, state, detail = "warning", "ended", one.death
    if one.has_left:
        mood, state = "warning", "left the program"
    if at_fault:
        mood = "error"
    return Doing(
        mood,
        state,
        "" if op is None else f"{op.op} #{op.seq}",
        "" if group is None else group.name,
        "" if line is None else f"{line} {line.function}".strip(),
        detail,
    )


def _first_in_flight(one: RankEvidence) -> tuple[Group, IssuedOp] | None:
    """Return the oldest op in flight, and its group."""
    found = [
        (op.order, place, group, op)
        for place, (group, known) in enumerate(one.groups.items())
        for op in known.ops
        if op.in_flight
    ]
    return min(found)[2:] if found else None


def line_of_op(one: RankEvidence) -> SourceLine | None:
    """Return the line of the op that a rank waits in."""
    found = _first_in_flight(one)
    return None if found is None else found[1].line


def _waited(ranks: Iterable[RankEvidence]) -> str:
    """Return how long ranks have been in their op, from the least to the most."""
    seconds = []
    for one in ranks:
        found = _first_in_flight(one)
        if found is None:
            continue
        since = found[1].started_ns or found[1].created_ns
        if since is not None and one.read_ns is not None:
            seconds.append(max(0, one.read_ns - since) / 1e9)
    if not seconds:
        return ""
    least, most = elapsed_text(min(seconds)), elapsed_text(max(seconds))
    return least if least == most else f"{least} – {most}"
