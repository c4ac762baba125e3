"""Which rows a table of ranks has, and in which order: equal ranks are one row.

The board in a terminal arranges its rows with it; ``page/arrange.js`` is the same for
the board in a page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rankscope.backends.rank_sets import group_by

from .rows import Cells

__all__ = [
    "MANY",
    "Item",
    "View",
    "arrange",
    "filter_of",
    "folded_cells",
    "is_conspicuous",
    "value_of",
]

#: Ranks from which on equal ones are one row.
MANY = 24


@dataclass(frozen=True)
class View:
    """What a user may ask of the table."""

    #: One row for equal ranks, where there are many.
    fold: bool = True
    #: Only ranks at fault, and what is wrong in other ways.
    culprits: bool = False
    #: Numbers of ranks, or a part of any cell.
    filter: str = ""
    #: The key of a column; empty: by rank, and culprits first where rows are folded.
    sort: str = ""
    descending: bool = False
    #: The keys of folds that are open.
    opened: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Item:
    """A row of the table: one rank, or the ranks of a fold."""

    key: str
    ranks: tuple[int, ...]
    #: Whether it stands for several ranks.
    fold: bool = False
    #: Whether the rows of these ranks follow it.
    open: bool = False
    #: Less for what comes first: ranks at fault.
    place: int = 0


def arrange(rows: Mapping[int, Cells], view: View) -> list[Item]:
    """Return the rows in order; an open fold is followed by those of its ranks."""
    fits = filter_of(view.filter)
    kept = [
        rank
        for rank in sorted(rows)
        if fits(rank, rows[rank]) and (not view.culprits or is_conspicuous(rows[rank]))
    ]
    folds = view.fold and len(rows) >= MANY
    items = _folds_of(rows, kept) if folds else [_single(rank) for rank in kept]
    if view.sort:
        items = _sorted(items, rows, view)
    elif folds:
        items.sort(key=lambda one: one.place)
    found = []
    for item in items:
        is_open = item.fold and item.key in view.opened
        found.append(replace(item, open=is_open))
        if is_open:
            found += map(_single, item.ranks)
    return found


def _single(rank: int, place: int = 0) -> Item:
    return Item(f"rank {rank}", (rank,), place=place)


def _folds_of(rows: Mapping[int, Cells], kept: Iterable[int]) -> list[Item]:
    folds = group_by(kept, lambda rank: _likeness(rows[rank]))
    return [
        Item(f"{place} {parts}", tuple(ranks), fold=True, place=place)
        if len(ranks) > 1
        else _single(ranks[0], place)
        for (place, parts), ranks in folds.items()
    ]


def _likeness(row: Cells) -> tuple[int, tuple[Any, ...]]:
    """Return what makes ranks equal: at fault, waiting, or strange in the same way.

    Ranks that go on are equal whatever op they are in: else rows would come and go with
    each.
    """
    mood, state, verdict = row["mood"], row["state"], row.get("verdict")
    op, seq, line, lag = (row.get(key) for key in ("op", "seq", "line", "lag"))
    if row.get("blame"):
        return 0, (verdict, state, op, seq, line)
    if mood == "error" and state != "aborted":
        return 1, (state,)
    if verdict:
        return 2, (verdict, op, seq, line)
    if row.get("awaited"):
        return 1, ("late",)
    if mood == "warning" or lag:
        return 1, (state, op, seq, lag)
    if mood in ("working", "busy"):
        return 3, (row.get("cell"),)
    return 4, (state, row.get("failed"))


def is_conspicuous(row: Cells) -> bool:
    """Return whether a rank is at fault, or strange: not one that waits or goes on."""
    return _likeness(row)[0] < 2


_RANKS = re.compile(r"(\d{1,9})(?:\s*[-–]\s*(\d{1,9}))?")


def filter_of(text: str) -> Callable[[int, Cells], bool]:
    """Return a test of rows: ``3, 8-11`` means ranks, another text a part of a cell."""
    wanted = text.strip().lower()
    if not wanted:
        return lambda rank, row: True
    parts = [_RANKS.fullmatch(part.strip()) for part in wanted.split(",")]
    if all(parts):
        spans = [(int(one[1]), int(one[2] or one[1])) for one in parts if one]
        return lambda rank, row: any(first <= rank <= last for first, last in spans)
    return lambda rank, row: any(
        key != "mood" and wanted in str(value).lower() for key, value in row.items()
    )


_UNITS: dict[str, float] = {
    **{unit: 1024.0**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB"))},
    **{"TiB": 1024.0**4, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9, "h": 3600e9},
    **{"kB/s": 1e-3, "MB/s": 1.0, "GB/s": 1e3},
}
#: Cells of which a fold shows the lowest and the highest.
_RANGES = ("last", "algbw", "busbw", "memory", "cpu", "gpu_memory", "waits")
_NUMBER = re.compile(r"#?(-?\d+(?:\.\d+)?)(%| (\S+))?(?: · .*)?")


def value_of(key: str, rank: int, row: Cells) -> float | str | None:
    """Return a cell for comparison: its number, or its text; ``None``: it is empty."""
    if key == "rank":
        return rank
    if key in ("elapsed", "beat"):
        # What began first has lasted longest.
        since = row.get("silent" if key == "beat" else "since")
        return -float(since) if since else None
    value = row.get(key)
    if value in (None, "", 0):
        return None
    found = _NUMBER.fullmatch(str(value))
    if found is None:
        return str(value)
    return float(found[1]) * _UNITS.get(found[3] or "", 1.0)


def _sorted(items: Sequence[Item], rows: Mapping[int, Cells], view: View) -> list[Item]:
    """Return `items` by a column; those that have nothing there come last."""
    full, empty = [], []
    for item in items:
        value = value_of(view.sort, item.ranks[0], rows[item.ranks[0]])
        if value is None:
            empty.append(item)
        else:
            # Numbers before texts.
            full.append(((isinstance(value, str), value), item))
    # Ranks that are equal stay in their order.
    full.sort(key=lambda one: one[0], reverse=view.descending)
    return [*(item for _, item in full), *empty]


def folded_cells(rows: Sequence[Cells]) -> Cells:
    """Return the cells of a fold: those in which its ranks are equal, and extremes."""
    first = rows[0]
    cells: Cells = {
        key: value
        for key, value in first.items()
        if all(row.get(key) == value for row in rows)
    }
    cells.setdefault("mood", "busy")
    cells.setdefault("state", "running")
    if "seq" not in cells and "op" in cells:
        numbers = [value_of("seq", 0, row) for row in rows if "seq" in row]
        known = [int(one) for one in numbers if isinstance(one, float)]
        if known:
            cells["seq"] = f"#{min(known)}–{max(known)}"
    for key in _RANGES:
        texts = {
            value: str(row[key])
            for row in rows
            if key in row and isinstance(value := value_of(key, 0, row), float)
        }
        if texts and key not in cells:
            cells[key] = f"{texts[min(texts)]} – {texts[max(texts)]}"
    for key in ("since", "at"):
        if all(key in row for row in rows):
            cells[key] = min(float(row[key]) for row in rows)
    return cells
