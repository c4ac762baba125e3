"""BenchReport: the result of a benchmark as nccl-tests' table and as plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rankscope.engines import BenchResult, BenchRow

from .bench_plot import Series, colour, marker, plot
from .tables import aligned, style_of, trusted_html
from .units import bandwidth_text, bytes_text, duration_text

__all__ = ["BenchReport"]

# Title and unit, as in nccl-tests.
_COLUMNS = (
    ("backend", ""),
    ("size", "B"),
    ("count", "elements"),
    ("type", ""),
    ("time", "µs"),
    # With its unit in each cell: a small array has kB/s.
    ("algbw", ""),
    ("busbw", ""),
    ("#wrong", ""),
)


class BenchReport(BenchResult):
    """A `BenchResult` that shows itself: table and plots, or text."""

    def __repr__(self) -> str:
        return _text(self)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        bundle = {"text/plain": _text(self)}
        if len(self) > 0:
            bundle["text/html"] = _html(self)
        return bundle


def _cells(row: BenchRow) -> tuple[str, ...]:
    return (
        row.backend,
        str(row.size),
        str(row.count),
        row.dtype,
        f"{row.time:.1f}" if row.time < 1000 else f"{row.time:.0f}",
        bandwidth_text(row.algbw),
        bandwidth_text(row.busbw),
        str(row.wrong),
    )


def _title(result: BenchResult) -> str:
    row = result[0]
    ranks = "1 rank" if row.ranks == 1 else f"{row.ranks} ranks"
    return f"{row.op} · {ranks}"


def _text(result: BenchResult) -> str:
    if not result:
        return "nothing was measured"
    rows = [_cells(row) for row in result]
    heads = [title for title, _ in _COLUMNS]
    units = [f"({unit})" if unit else "" for _, unit in _COLUMNS]
    lines = aligned([heads, units, *rows], [True] * len(_COLUMNS))
    return "\n".join([f"# {_title(result)}", *lines])


def _html(result: BenchResult) -> str:
    backends = list(dict.fromkeys(row.backend for row in result))
    keys = "".join(
        f'<span class="key"><svg width="11" height="11" fill="{colour(place)}">'
        f"{marker(place, 5.5, 5.5)}</svg> {escape(name)}</span>"
        for place, name in enumerate(backends)
    )
    title = f"<b>{escape(result[0].op)}</b>"
    rest = _title(result).removeprefix(result[0].op)
    quiet = f'<span class="quiet">{escape(rest)}</span>'
    plots = plot(
        "time",
        _series(result, backends, "time"),
        lambda micros: _even(duration_text(micros / 1e6)),
    )
    plots += _bandwidth_plot(result, backends)
    shown = trusted_html(f'<div class="plots">{plots}</div>')
    # The sheet has only variables with fallbacks, and greys that stand on white and on
    # black, so that it is legible in any theme and on a page that has none.
    return (
        f'<div class="rankscope-bench">{style_of("bench")}<p>{title}{quiet}{keys}</p>'
        f"{shown}{_table(result)}</div>"
    )


def _even(text: str) -> str:
    """Return a power of ten without the zeros behind the point."""
    return text.replace(".00", "").replace(".0", "")


def _bandwidth_plot(result: BenchResult, backends: Sequence[str]) -> str:
    # One rank has no bus bandwidth, and an op without duration has none either.
    series = _series(result, backends, "busbw")
    if not series:
        return ""
    return plot("bus bandwidth", series, lambda value: _even(bandwidth_text(value)))


def _series(result: BenchResult, backends: Sequence[str], what: str) -> list[Series]:
    found = []
    for backend in backends:
        rows = [
            row
            for row in result
            if row.backend == backend and row.size > 0 and getattr(row, what) > 0
        ]
        if rows:
            points = [(row.size, getattr(row, what)) for row in rows]
            found.append(Series(backend, points, [_note(row) for row in rows]))
    return found


def _note(row: BenchRow) -> str:
    spread = (
        f"{duration_text(row.time_min / 1e6)} to {duration_text(row.time_max / 1e6)}"
    )
    bandwidth = f", busbw {bandwidth_text(row.busbw)}" if row.busbw > 0 else ""
    return (
        f"{row.backend}, {bytes_text(row.size)}: {duration_text(row.time / 1e6)} "
        f"(ranks: {spread}){bandwidth}"
    )


def _table(result: BenchResult) -> str:
    head = "".join(
        f"<th>{title}{f'<br>{unit}' if unit else ''}</th>" for title, unit in _COLUMNS
    )
    body = []
    for row in result:
        *cells, wrong = (escape(cell) for cell in _cells(row))
        bad = ' class="bad"' if row.wrong else ""
        body.append(
            f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}"
            f"<td{bad}>{wrong}</td></tr>"
        )
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )
