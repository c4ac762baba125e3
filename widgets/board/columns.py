"""The columns of the board, for the page, HTML and text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rankscope.backends.rank_sets import name_ranks

from ..tables import Column, Row
from ..units import elapsed_text
from .arrange import Item, View, arrange, folded_cells
from .rows import Cells

__all__ = ["COLUMNS", "columns_of", "shown", "shown_item", "shown_of"]

#: The longest list of the ranks of a fold; of a longer one, their number is shown.
RANKS = 24

#: Seconds at one line from which on they are shown; the page has the same number.
LINGERS = 5.0

#: `drop`: the highest go first where there is no room; the op goes last.
COLUMNS = (
    Column("rank", "rank", "global rank", numeric=True),
    Column("host", "host", "host of the rank's engine", drop=7),
    Column("pid", "pid", "process of the rank's engine", True, drop=8),
    Column("device", "device", "device types, with the backends in use", drop=8),
    Column("state", "state", "what the rank is doing"),
    Column("op", "op", "the oldest op in flight, or the last one completed", drop=1),
    Column("seq", "seq", "sequence number in the group", True, drop=3),
    Column("lag", "lag", "collectives behind the rank that is ahead", True, drop=4),
    Column("late", "late", "ops it enters after the others, by how much", True, drop=5),
    Column("waits", "waits", "part of its time: it waits for late ranks", True, drop=5),
    Column("line", "line", "where the op was issued, or the rank computes", drop=2),
    Column("size", "size", "bytes it moves, as nccl-tests counts", True, drop=6),
    Column("dtype", "dtype", "data type of its first array", drop=8),
    Column("elapsed", "elapsed", "time in flight / median of this op", True, drop=3),
    Column("last", "last", "duration of the last op completed", True, drop=6),
    Column("algbw", "algbw", "of the last op: size / time", True, drop=9),
    Column("busbw", "busbw", "of the last op, on the bus", True, drop=6),
    Column("memory", "memory", "resident memory of the rank's process", True, drop=9),
    Column("cpu", "CPU", "of a core, that its process kept busy", True, drop=7),
    Column("gpu_memory", "GPU memory", "what the process holds of it", True, drop=7),
    Column("queue", "queue", "ops in flight", True, drop=10),
    Column("beat", "silent", "since the last heartbeat", True, drop=2),
    Column("verdict", "verdict", "verdict of the diagnosis on the rank"),
)


def columns_of(rows: Iterable[Cells]) -> list[Column]:
    """Return the columns for these rows: with a host only where it differs."""
    several = len({row.get("host") for row in rows}) > 1
    return [
        replace(column, drop=1) if column.key == "host" else column
        for column in COLUMNS
        if column.key != "host" or several
    ]


def shown(rank: int, row: Cells, now: float, least: float = 0.0) -> Row:
    """Return what each column shows of a row; no elapsed time below `least` seconds."""
    texts = {key: str(value) for key, value in row.items()}
    texts["rank"] = str(rank)
    texts["lag"] = f"−{row['lag']}" if row.get("lag") else ""
    texts["queue"] = str(row.get("queue") or "")
    if "at" in row and now - float(row["at"]) >= LINGERS:
        texts["line"] += f" for {elapsed_text(now - float(row['at']))}"
    texts["elapsed"] = ""
    if "since" in row and now - float(row["since"]) >= least:
        texts["elapsed"] = elapsed_text(now - float(row["since"]))
        if "usual" in row:
            texts["elapsed"] += f" / {row['usual']}"
    silent = 0.0 if row["state"] == "dead" else float(row.get("silent", 0))
    texts["beat"] = elapsed_text(now - silent) if silent else ""
    return Row(
        {column.key: texts.get(column.key, "") for column in COLUMNS},
        texts["mood"],
        "blame" in row,
    )


def shown_item(
    item: Item, rows: Mapping[int, Cells], now: float, least: float = 0.0
) -> Row:
    """Return what each column shows of one rank, or of the ranks of a fold."""
    first = item.ranks[0]
    if not item.fold:
        return shown(first, rows[first], now, least)
    cells = folded_cells([rows[rank] for rank in item.ranks])
    row = shown(first, cells, now, least)
    ranks = name_ranks(item.ranks)
    if len(ranks) > RANKS:
        ranks = f"{len(item.ranks)} ranks"
    return replace(row, texts={**row.texts, "rank": ranks})


def shown_of(
    ranks: Mapping[int, Cells], now: float, most: int
) -> tuple[list[Column], list[Row], str]:
    """Return the columns that are not empty, `most` rows, and what is left out."""
    items = arrange(ranks, View())
    rows = [shown_item(item, ranks, now) for item in items[:most]]
    columns = [
        column
        for column in columns_of(ranks.values())
        if any(row.texts[column.key] for row in rows)
    ]
    left = sum(len(item.ranks) for item in items[most:])
    return columns, rows, f"and {left} more ranks" if left else ""
