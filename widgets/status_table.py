"""StatusTable: what every rank is doing, as text and as HTML.

The rows are worked out once, from plain data, and both forms show the same
words; colour only repeats what a word says.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from rankscope.engines.status import ClusterStatus, GroupStatus, OpStatus, RankStatus

from .ranks import name_ranks

__all__ = ["Row", "Section", "StatusTable", "sections"]

Mood = Literal["calm", "working", "warning", "error"]

#: Column titles, and whether the column holds numbers.
COLUMNS = (
    ("rank", True),
    ("host", False),
    ("pid", True),
    ("engine", True),
    ("device", False),
    ("state", False),
    ("enqueued", False),
    ("started", False),
    ("completed", False),
    ("heartbeat", True),
)

#: What text leaves out where there is no room, in this order.
DROPS = ("engine", "started", "host", "device", "pid", "heartbeat")

_TIME = re.compile(r"\d\d:\d\d:\d\d")

#: Seconds without a sign of life that are worth a second look: three missed beats.
SILENT = 3.0


@dataclass(frozen=True)
class Row:
    """One rank in one group: a cell for each of `COLUMNS`."""

    cells: tuple[str, ...]
    mood: Mood


@dataclass(frozen=True)
class Section:
    """One group: its title, facts about it, its rows, and what went wrong."""

    title: str
    facts: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


class StatusTable:
    """The state of a cluster at one moment, for a terminal or a notebook."""

    def __init__(self, status: ClusterStatus) -> None:
        self.status = status

    def __str__(self) -> str:
        return _text(self.status, shutil.get_terminal_size((120, 24)).columns)

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": _html(self.status)}


# -- rows ----------------------------------------------------------------------


def sections(status: ClusterStatus) -> list[Section]:
    """Return one section per group, or one without a group where there is none."""
    # Disjoint groups may share a name: what tells them apart is their ranks.
    members: dict[tuple[str, tuple[int, ...]], list[tuple[RankStatus, GroupStatus]]]
    members = {}
    for rank in status.ranks:
        for group in rank.groups:
            members.setdefault((group.name, group.ranks), []).append((rank, group))
    found = []
    introduced: set[int] = set()
    for pairs in members.values():
        found.append(_section(pairs, introduced))
        introduced.update(rank.rank for rank, _ in pairs)
    # A rank without a group (its engine is new) must be seen all the same.
    homeless = [rank for rank in status.ranks if not rank.groups]
    if homeless:
        rows = tuple(_row(rank, None, introduced) for rank in homeless)
        found.append(Section("no group", (), rows, _deaths(homeless)))
    return found


def _section(
    members: Sequence[tuple[RankStatus, GroupStatus]], introduced: set[int]
) -> Section:
    one = members[0][1]
    facts = [name_ranks(one.ranks), one.backend, f"timeout {_duration(one.timeout)}"]
    generation = max(group.generation for _, group in members)
    if generation > 0:
        facts.append(f"generation {generation}")
    aborted: dict[str, tuple[str, list[int]]] = {}
    for rank, group in members:
        if group.state == "aborted":
            reason = group.reason or "no reason given"
            # Ranks note the time to the second, each by its own clock.
            same = _TIME.sub("", reason)
            aborted.setdefault(same, (reason, []))[1].append(rank.rank)
    notes = [
        f"aborted on {name_ranks(ranks)}: {reason}"
        for reason, ranks in aborted.values()
    ]
    fresh = [rank for rank, _ in members if rank.rank not in introduced]
    return Section(
        title=one.name,
        facts=tuple(facts),
        rows=tuple(_row(rank, group, introduced) for rank, group in members),
        notes=(*notes, *_deaths(fresh)),
    )


def _deaths(ranks: Sequence[RankStatus]) -> tuple[str, ...]:
    return tuple(
        f"rank {rank.rank} is dead: {rank.reason or 'its engine is gone'}"
        for rank in ranks
        if not rank.alive
    )


def _row(rank: RankStatus, group: GroupStatus | None, introduced: set[int]) -> Row:
    if rank.rank in introduced:
        # Said once above; repeated in every group it would drown the rest.
        engine = ("", "", "", "")
    else:
        kinds = ", ".join(group.devices) if group is not None else ""
        device = "; ".join(filter(None, (rank.gpu, kinds)))
        engine = (rank.host, str(rank.pid), str(rank.engine_id), device)
    state, mood = _state(rank, group)
    ops: tuple[OpStatus | None, ...] = (None, None, None)
    if group is not None:
        ops = (group.enqueued, group.started, group.completed)
    heartbeat = "–" if rank.heartbeat_age is None else f"{rank.heartbeat_age:.1f} s"
    return Row(
        (str(rank.rank), *engine, state, *(_op(op) for op in ops), heartbeat), mood
    )


def _state(rank: RankStatus, group: GroupStatus | None) -> tuple[str, Mood]:
    if not rank.alive:
        return "dead", "error"
    if rank.state == "unreachable":
        return "unreachable", "error"
    if group is not None and group.state == "aborted":
        return "aborted", "error"
    if group is not None and group.oldest is not None:
        oldest = group.oldest
        doing = "queued" if oldest.state.upper() == "SCHEDULED" else "in"
        parts = [f"{doing} {oldest.op}"]
        if oldest.seq is not None:
            parts[0] += f" #{oldest.seq}"
        if oldest.elapsed is not None:
            parts.append(_duration(oldest.elapsed))
        if oldest.source:
            parts.append(oldest.source)
        return " · ".join(parts), "working"
    if rank.state == "busy":
        parts = ["busy"]
        if rank.busy_for is not None:
            parts.append(_duration(rank.busy_for))
        if rank.cell is not None:
            parts.append(f"cell {rank.cell}")
        return " · ".join(parts), "working"
    if rank.heartbeat_age is not None and rank.heartbeat_age > SILENT:
        return "silent", "warning"
    return rank.state, "calm"


def _op(op: OpStatus | None) -> str:
    if op is None:
        return "–"
    return op.op if op.seq is None else f"#{op.seq} {op.op}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h"


def _title(status: ClusterStatus) -> list[str]:
    size = status.world_size
    facts = [f"{size} rank" if size == 1 else f"{size} ranks", status.launcher]
    if status.state != "running":
        facts.append(status.state)
    if status.dead:
        facts.append(f"{name_ranks(status.dead)} dead")
    facts.append(f"cluster {status.cluster_id}")
    return facts


# -- text ----------------------------------------------------------------------


def _text(status: ClusterStatus, room: int) -> str:
    """The table in lines of at most `room` characters, where that can be."""
    found = sections(status)
    titles = tuple(title for title, _ in COLUMNS)
    rows = [titles, *(row.cells for section in found for row in section.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    places = list(range(len(COLUMNS)))
    for title in DROPS:
        if sum(widths[i] + 2 for i in places) - 2 <= room:
            break
        places.remove(titles.index(title))

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cells[i].rjust(widths[i]) if COLUMNS[i][1] else cells[i].ljust(widths[i])
            for i in places
        ).rstrip()

    out = [" · ".join(_title(status)), "", line(titles)]
    for section in found:
        rule = f"── {' · '.join((section.title, *section.facts))} "
        out.append(rule.ljust(sum(widths[i] + 2 for i in places) - 2, "─"))
        out += [line(row.cells) for row in section.rows]
        out += [f"   {note}" for note in section.notes]
    return "\n".join(out)


# -- HTML ----------------------------------------------------------------------

# Only variables with fallbacks, and greys that stand on white and on black, so
# that it reads in any theme and in a page that has none.
TEMPLATE = """\
<div class="rankscope-status">
<style>
.rankscope-status {{
  font-family: var(--jp-ui-font-family, system-ui, sans-serif);
  font-size: var(--jp-ui-font-size1, 13px);
  line-height: 1.45;
  overflow-x: auto;
}}
.rankscope-status .title {{ margin: .3em 0 .4em; white-space: nowrap; }}
.rankscope-status .quiet, .rankscope-status thead th {{
  color: var(--jp-ui-font-color2, inherit); opacity: .85; font-weight: normal;
}}
.rankscope-status table, .jp-RenderedHTMLCommon .rankscope-status table {{
  border-collapse: collapse; border: none; margin: 0; table-layout: auto;
  font-size: inherit; color: inherit; font-variant-numeric: tabular-nums;
}}
.rankscope-status table tr, .jp-RenderedHTMLCommon .rankscope-status table tr {{
  background: none;
}}
.rankscope-status table th, .rankscope-status table td,
.jp-RenderedHTMLCommon .rankscope-status table :is(th, td) {{
  padding: .2em 1.1em .2em 0; border: none; max-width: none;
  text-align: left; vertical-align: baseline; white-space: nowrap;
}}
.rankscope-status table :is(th, td).number,
.jp-RenderedHTMLCommon .rankscope-status table :is(th, td).number {{
  text-align: right;
}}
.rankscope-status table tbody th,
.jp-RenderedHTMLCommon .rankscope-status table tbody th {{
  border-top: 1px solid var(--jp-border-color2, rgba(127, 127, 127, .4));
  padding-top: .35em; font-weight: normal;
}}
.rankscope-status tbody + tbody th {{ padding-top: .8em; }}
.rankscope-status b {{ font-weight: 600; }}
.rankscope-status .dot {{
  display: inline-block; width: .55em; height: .55em; border-radius: 50%;
  margin-right: .5em; border: 1px solid currentColor; box-sizing: border-box;
}}
.rankscope-status .calm .dot {{ opacity: .45; }}
.rankscope-status .working .dot {{
  color: var(--jp-brand-color1, #1976d2); background: currentColor;
}}
.rankscope-status .warning .dot {{
  color: var(--jp-warn-color1, #f57c00); background: currentColor;
}}
.rankscope-status .error .dot {{
  color: var(--jp-error-color1, #d32f2f); background: currentColor;
}}
</style>
<p class="title">{title}</p>
<table>
<thead><tr>{head}</tr></thead>
{body}
</table>
</div>"""


def _html(status: ClusterStatus) -> str:
    first, *rest = (escape(fact) for fact in _title(status))
    title = f'<b>{first}</b> <span class="quiet">· {" · ".join(rest)}</span>'
    head = "".join(
        f'<th class="{_class(numeric)}">{name}</th>' for name, numeric in COLUMNS
    )
    body = "\n".join(_section_html(section) for section in sections(status))
    return TEMPLATE.format(title=title, head=head, body=body)


def _section_html(section: Section) -> str:
    facts = "".join(f" · {escape(fact)}" for fact in section.facts)
    lines = [
        f'<tr><th colspan="{len(COLUMNS)}"><b>{escape(section.title)}</b>'
        f'<span class="quiet">{facts}</span></th></tr>'
    ]
    for row in section.rows:
        cells = []
        for cell, (name, numeric) in zip(row.cells, COLUMNS, strict=True):
            dot = '<span class="dot"></span>' if name == "state" else ""
            cells.append(f'<td class="{_class(numeric)}">{dot}{escape(cell)}</td>')
        lines.append(f'<tr class="{row.mood}">{"".join(cells)}</tr>')
    lines += [
        f'<tr class="error"><td></td><td colspan="{len(COLUMNS) - 1}">'
        f'<span class="dot"></span>{escape(note)}</td></tr>'
        for note in section.notes
    ]
    return f"<tbody>{''.join(lines)}</tbody>"


def _class(numeric: bool) -> str:
    return "number" if numeric else "text"
