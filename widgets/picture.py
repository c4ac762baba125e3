"""Pictures of what a collective moved, drawn from the ranks' own arrays.

A number has the colour of the rank that had it before, and a number that no rank had
before has all colours: it was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Picture", "picture"]

# Light enough for dark letters, whatever the page behind them is.
_COLOURS = (
    *("#8ecae6", "#ffd166", "#95d5b2", "#f4a6b8"),
    *("#c8b6ff", "#ffb27a", "#9fe0dc", "#d9d68c"),
)
_NOBODY = f"linear-gradient(90deg, {', '.join(_COLOURS[:4])})"
_BLANK = -1

_Row = list[list[float]]  # the arrays that one rank holds


def picture(before: Sequence[Any], after: Sequence[Any]) -> Picture:
    """Return a picture of what each rank held before a collective and after it.

    A notebook shows it as HTML, with a colour for each rank; a terminal as text.

    Parameters
    ----------
    before, after : sequence
        One entry for each rank, in rank order, as ``%dist_pull before after`` makes
        them: an array of numbers, a list of arrays, or ``None`` where the rank has
        nothing. -1 stands for "nothing there yet".

    Returns
    -------
    Picture
        The last expression of a cell shows it.

    Raises
    ------
    ValueError
        There are not as many entries in the one as in the other.

    Examples
    --------
    >>> dist.picture(np.array([[1, 2], [3, 4]]), np.array([[4, 6], [4, 6]]))
            before      after
    rank 0  01 02   →   04 06
    rank 1  03 04   →   04 06
    """
    if len(before) != len(after):
        raise ValueError(
            f"before has {len(before)} entries, after has {len(after)}: give one for "
            "each rank"
        )
    return Picture([_row(entry) for entry in before], [_row(entry) for entry in after])


class Picture:
    """Two columns of cells, a row for each rank; as text where there is no HTML."""

    def __init__(self, before: list[_Row], after: list[_Row]) -> None:
        self.before = before
        self.after = after
        # Number → the rank that had it first.
        self._owners: dict[float, int] = {}
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

    def _box(self, value: float) -> str:
        style = "display:inline-block;min-width:2.1em;margin:1px;text-align:center"
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
    return [[float(value) for value in np.ravel(array)] for array in arrays]


def _number(value: float) -> str:
    if value == _BLANK:
        return "·"
    return f"{int(value):02d}" if value.is_integer() else f"{value:.3g}"


def _text(row: _Row) -> str:
    arrays = (" ".join(f"{_number(v):>2}" for v in array) for array in row)
    return " | ".join(arrays) or "nothing"


def _table_row(*cells: str) -> str:
    style = "border:0;background:none;padding:.1em .6em;text-align:left"
    style += ";white-space:nowrap;font-family:monospace"
    inside = "".join(f'<td style="{style}">{cell}</td>' for cell in cells)
    return f'<tr style="background:none">{inside}</tr>'
