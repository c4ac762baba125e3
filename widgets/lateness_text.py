"""Which ranks kept the others waiting, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankscope.backends.observe.late_findings import LateFinding, late_lines
from rankscope.backends.observe.lateness import GroupLateness, RankLateness
from rankscope.backends.observe.speeds import Speed
from rankscope.backends.rank_sets import name_ranks

from .tables import Column, Row, lines
from .units import bandwidth_text, bytes_text, duration_text

__all__ = ["COLUMNS", "late_rows", "late_tables", "lateness_text"]

COLUMNS = (
    Column("rank", "rank", "global rank", True),
    Column("late", "late", "in how many ops it entered after the others", True),
    Column("by", "by", "by how long, in the middle", True),
    Column("waits", "waits", "part of its time that it waits for late ranks", True),
)

#: Ranks of a group up to which all are shown; of others those that are late most often.
MOST = 16
#: What the fastest ops have to be exceeded by to be told.
SLOWER = 1.5


def lateness_text(
    groups: Sequence[GroupLateness], findings: Iterable[LateFinding]
) -> str:
    """Return a table for each group, and what is certain."""
    if not groups:
        return "no rank was late: no collective that all ranks of a group enter"
    said = late_lines(findings) or ["no rank is late for certain"]
    return "\n".join([late_tables(groups), *said])


def late_tables(groups: Iterable[GroupLateness]) -> str:
    """Return a table for each group: how often a rank was late, and how it waited."""
    return "\n".join(line for group in groups for line in _table(group))


def _table(group: GroupLateness) -> Sequence[str]:
    title = f"group {group.key.name!r} ({name_ranks(group.key.ranks)})"
    if group.unknown:
        return [f"{title}: who is late is not known: {group.unknown}"]
    count = max(one.of for one in group.ranks.values())
    rows = late_rows(group)
    left = len(group.ranks) - len(rows)
    rest = [f"… and {left} more ranks"] if left else []
    title += f", {'the last ' if group.later else ''}{count} collectives"
    if group.pauses:
        title += f", without {group.pauses} in a pause"
    if group.by_events:
        title += ", by the GPUs' events"
    if group.clock_error:
        within = duration_text(group.clock_error)
        title += f", the clocks of the hosts agree within {within}"
    return [f"{title}:", *lines(COLUMNS, rows), *rest, *map(_speed, group.speeds)]


def _speed(one: Speed) -> str:
    """Return how fast an op is; what it was only where that is something else."""
    said = f"once all are in, {one.op} of {bytes_text(one.nbytes)} takes "
    said += f"{duration_text(one.takes)}, busbw {bandwidth_text(one.busbw)}"
    if one.takes > SLOWER * one.best:
        said += f"; at best {duration_text(one.best)}, {bandwidth_text(one.best_busbw)}"
    return said


def late_rows(group: GroupLateness) -> list[Row]:
    """Return a row for each rank; of many, those that were late most often."""
    most = sorted(group.ranks, key=lambda rank: -group.ranks[rank].late)[:MOST]
    return [_row(rank, group.ranks[rank]) for rank in sorted(most)]


def _row(rank: int, one: RankLateness) -> Row:
    texts = {
        "rank": str(rank),
        "late": f"{one.late} of {one.of}",
        "by": duration_text(one.by) if one.late else "",
        "waits": f"{one.waits:.0%}",
    }
    return Row(texts)
