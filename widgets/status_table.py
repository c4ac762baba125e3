"""StatusTable: what every rank is doing at one moment, as text and as HTML."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import islice
from typing import Any

from rankscope.backends.observe.lateness import Lateness
from rankscope.backends.rank_sets import name_ranks
from rankscope.engines.status import ClusterStatus, OpStatus

from .board.group import Group
from .board.model import BoardModel
from .board.rows import Cells, text
from .tables import (
    Column,
    Row,
    Section,
    block_html,
    fitting,
    lines,
    paragraph_html,
    table_html,
    title_html,
)
from .units import bytes_text, elapsed_text

__all__ = ["COLUMNS", "StatusTable", "sections"]

COLUMNS = (
    Column("rank", "rank", "global rank", numeric=True),
    Column("host", "host", "host of the rank's engine", drop=4),
    Column("pid", "pid", "process of the rank's engine", numeric=True, drop=2),
    Column("engine", "engine", "number of the engine", numeric=True, drop=6),
    Column("device", "device", "device types, with the backends in use", drop=3),
    Column("memory", "memory", "resident memory of the rank's process", True, drop=4),
    Column("gpu_memory", "GPU memory", "what the process holds of it", True, drop=2),
    Column("state", "state", "what the rank is doing"),
    Column("enqueued", "enqueued", "the last op issued"),
    Column("started", "started", "the last op started", drop=5),
    Column("completed", "completed", "the last op completed"),
    Column("heartbeat", "heartbeat", "time since the last heartbeat", True, drop=1),
)

_TIME = re.compile(r"\d\d:\d\d:\d\d")


class StatusTable:
    """The state of a cluster at one moment, for a terminal or a notebook."""

    def __init__(self, status: ClusterStatus, lateness: Lateness | None = None) -> None:
        self._model = BoardModel.of(status, lateness)

    def __str__(self) -> str:
        return _text(self._model, shutil.get_terminal_size((120, 24)).columns)

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": _html(self._model)}


def _text(model: BoardModel, width: int) -> str:
    """Return the table in lines of at most `width` characters, where possible."""
    found = sections(model)
    rows = [row for section in found for row in section.rows]
    titles, *body = lines(fitting(_columns(rows), rows, width), rows)
    room = max(map(len, (titles, *body)))
    out = [" · ".join(_facts(model)), "", titles]
    left = iter(body)
    for section in found:
        rule = f"── {' · '.join((section.title, *section.facts))} "
        out.append(rule.ljust(room, "─"))
        out += islice(left, len(section.rows))
        out += [f"   {note}" for note in section.notes]
    return "\n".join([*out, *_advice(model)])


def _html(model: BoardModel) -> str:
    title, *facts = _facts(model)
    found = sections(model)
    columns = _columns([row for section in found for row in section.rows])
    parts = [
        paragraph_html(title_html(title, facts)),
        table_html(columns, found),
        *(paragraph_html(escape(one)) for one in _advice(model)),
    ]
    return f'<div class="rankscope-status">{block_html(parts)}</div>'


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Return all columns, but that of GPUs only where a rank has one."""
    with_gpus = any(row.texts["gpu_memory"] for row in rows)
    several = len({row.texts["host"] for row in rows} - {""}) > 1
    return [
        replace(one, drop=1) if several and one.key == "host" else one
        for one in COLUMNS
        if with_gpus or one.key != "gpu_memory"
    ]


def _facts(model: BoardModel) -> list[str]:
    head = model.head
    facts = [head["title"]]
    if head["state"] != "running":
        facts.append(head["state"])
    if head["dead"]:
        facts.append(f"{name_ranks(head['dead'])} dead")
    return [*facts, *head["facts"]]


def _advice(model: BoardModel) -> list[str]:
    """Return which ranks keep the others waiting, and what a person should change."""
    told = (*model.late, *model.head["advice"])
    return [f"{one[:1].upper()}{one[1:]}" for one in told]


def sections(model: BoardModel) -> list[Section]:
    """Return a section for each group, and one for the ranks that have no group.

    What concerns the engine of a rank is in the first row of the rank only: repeated
    in every group, it would hide the rest.
    """
    found = []
    introduced: set[int] = set()
    for group, tab in zip(model.groups, model.tabs(), strict=True):
        rows = tuple(
            _row(model, group, rank, row, rank not in introduced)
            for rank, row in group.rows().items()
        )
        notes = (*_aborts(group), *_deaths(group, introduced))
        found.append(Section(rows, tab["label"], tuple(tab["facts"]), notes))
        introduced.update(group.base)
    return found


def _row(model: BoardModel, group: Group, rank: int, row: Cells, first: bool) -> Row:
    one, status = model.ranks[rank], group.statuses.get(rank)
    age = one.heartbeat_age
    texts = {
        "rank": str(rank),
        "host": str(row["host"]) if first else "",
        "pid": str(row.get("pid", "")) if first else "",
        "engine": str(one.engine_id) if first and one.engine_id is not None else "",
        "device": str(row.get("device", "")) if first else "",
        "memory": bytes_text(one.memory) if first and one.memory is not None else "",
        "gpu_memory": str(row.get("gpu_memory", "")) if first else "",
        "state": _state(row, model.now),
        "enqueued": _op(None if status is None else status.enqueued),
        "started": _op(None if status is None else status.started),
        "completed": _op(None if status is None else status.completed),
        "heartbeat": "–" if age is None else elapsed_text(age),
    }
    return Row(texts, str(row["mood"]))


def _state(row: Cells, now: float) -> str:
    """Return the state, with the op in flight, since when, and where it was issued."""
    if row["mood"] not in ("working", "busy"):
        return str(row["state"])
    parts = [str(row["state"])]
    if row["mood"] == "working":
        parts = [f"in {row['op']} {row.get('seq', '')}".rstrip()]
    if "since" in row:
        parts.append(elapsed_text(now - float(row["since"])))
    if row["mood"] == "working" and "line" in row:
        parts.append(str(row["line"]))
    return " · ".join(parts)


def _op(op: OpStatus | None) -> str:
    if op is None:
        return "–"
    return op.op if op.seq is None else f"#{op.seq} {op.op}"


def _aborts(group: Group) -> list[str]:
    same: dict[str, tuple[str, list[int]]] = {}
    for rank, status in sorted(group.aborts.items()):
        why = text(status.why, 400)
        # Ranks note the time to the second, each by its own clock.
        same.setdefault(_TIME.sub("", why), (why, []))[1].append(rank)
    return [
        f"aborted on {name_ranks(ranks)}: {reason}" for reason, ranks in same.values()
    ]


def _deaths(group: Group, introduced: set[int]) -> list[str]:
    return [
        str(row.get("reason", f"rank {rank} is dead"))
        for rank, row in group.rows().items()
        if row["state"] == "dead" and rank not in introduced
    ]
