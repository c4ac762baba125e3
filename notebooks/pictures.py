"""Pictures of what a collective moved, drawn from the ranks' own arrays.

Numbers are written with two digits, and a rank's first digit is its own: 21
was made by rank 2. So every number tells where it comes from, and its colour
says the same again. A number that no rank had before was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Picture", "picture"]

# Light enough for dark letters, whatever the page behind them is.
_COLOURS = ("#8ecae6", "#ffd166", "#95d5b2", "#f4a6b8")
_NOBODY = f"linear-gradient(90deg, {', '.join(_COLOURS)})"
_BLANK = -1

_Row = list[list[int]]  # the arrays that one rank holds


def picture(before: Sequence[Any], after: Sequence[Any]) -> Picture:
    """Draw what each rank held before and after.

    One entry for each rank: an array of whole numbers, or a list of arrays, or
    ``None`` where the rank has nothing. -1 stands for "nothing there yet".
    """
    return Picture([_row(entry) for entry in before], [_row(entry) for entry in after])


class Picture:
    """Two columns of cells, a row for each rank; as text where there is no HTML."""

    def __init__(self, before: list[_Row], after: list[_Row]) -> None:
        self.before = before
        self.after = after
        # Number → the rank that had it first.
        self._owners: dict[int, int] = {}
        for rank, row in enumerate(before):
            for value in (value for array in row for value in array):
                self._owners.setdefault(value, rank)

    def __repr__(self) -> str:
        lefts = [_text(row) for row in self.before]
        width = max(len("before"), *map(len, lefts))
        lines = [f"        {'before':{width}}      after"]
        for rank, (left, right) in enumerate(zip(lefts, self.after, strict=True)):
            lines.append(f"rank {rank}  {left:{width}}  →   {_text(right)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            _table_row(f"rank {rank}", self._cells(held), "→", self._cells(holds))
            for rank, (held, holds) in enumerate(
                zip(self.before, self.after, strict=True)
            )
        ]
        head = _table_row("", "before", "", "after")
        return f'<table style="border:0;color:inherit">{head}{"".join(rows)}</table>'

    def _cells(self, row: _Row) -> str:
        arrays = ("".join(map(self._box, array)) for array in row)
        gap = '<span style="display:inline-block;width:.8em"></span>'
        return gap.join(arrays) or "nothing"

    def _box(self, value: int) -> str:
        style = "display:inline-block;width:2.1em;margin:1px;text-align:center"
        style += ";border-radius:3px"
        if value == _BLANK:
            style += ";outline:1px dashed currentColor;outline-offset:-1px;opacity:.6"
        else:
            owner = self._owners.get(value)
            paint = _NOBODY if owner is None else _COLOURS[owner % len(_COLOURS)]
            style += f";background:{paint};color:#1a1a1a"
        return f'<span style="{style}">{_number(value)}</span>'


def _row(entry: Any) -> _Row:
    if entry is None:
        return []
    arrays = entry if isinstance(entry, (list, tuple)) else [entry]
    return [[int(value) for value in np.ravel(array)] for array in arrays]


def _number(value: int) -> str:
    return "·" if value == _BLANK else f"{value:02d}"


def _text(row: _Row) -> str:
    arrays = (" ".join(f"{_number(v):>2}" for v in array) for array in row)
    return " | ".join(arrays) or "nothing"


def _table_row(*cells: str) -> str:
    style = "border:0;background:none;padding:.1em .6em;text-align:left"
    style += ";white-space:nowrap;font-family:monospace"
    inside = "".join(f'<td style="{style}">{cell}</td>' for cell in cells)
    return f'<tr style="background:none">{inside}</tr>'
