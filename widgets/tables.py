"""Tables as text and as HTML: those of the board and of the status."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

__all__ = [
    "GAP",
    "Column",
    "Row",
    "Section",
    "aligned",
    "block_html",
    "fitting",
    "fold_html",
    "lines",
    "page_file",
    "paragraph_html",
    "style_of",
    "table_html",
    "title_html",
    "trusted_html",
    "with_widths",
]


_FOLDER = Path(__file__).parent / "page"
#: What is between two columns.
GAP = "  "


@dataclass(frozen=True)
class Column:
    """One column; `key` is that of the cell it shows."""

    key: str
    title: str
    #: What the title stands for.
    about: str
    #: Whether the column holds numbers, which are aligned to the right.
    numeric: bool = False
    #: Where there is no room, columns are left out, those with the highest number
    #: first; a column with 0 is always shown.
    drop: int = 0


@dataclass(frozen=True)
class Row:
    """The text of each column by its key, and the mood of the row: a CSS class."""

    texts: Mapping[str, str]
    mood: str = ""
    #: Whether a verdict blames it.
    blamed: bool = False


@dataclass(frozen=True)
class Section:
    """Rows below a heading (none without a title), and notes on errors below them."""

    rows: tuple[Row, ...]
    title: str = ""
    facts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# -- text ------------------------------------------------------------------------


def fitting(columns: Sequence[Column], rows: Sequence[Row], width: int) -> list[Column]:
    """Return the columns that are shown where a line has `width` characters."""
    widths = {
        one.key: max(len(one.title), *(len(row.texts[one.key]) for row in rows), 0)
        for one in columns
    }
    return with_widths(columns, widths, width)


def with_widths(
    columns: Sequence[Column], widths: Mapping[str, int], width: int
) -> list[Column]:
    """Return the columns, of these widths, that a line of `width` characters has."""
    chosen = list(columns)
    for drop in sorted({column.drop for column in columns} - {0}, reverse=True):
        if sum(widths[one.key] + len(GAP) for one in chosen) - len(GAP) <= width:
            break
        chosen = [column for column in chosen if column.drop < drop]
    return chosen


def lines(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Return the titles and the rows, aligned, a line each."""
    table = [[column.title for column in columns]]
    table += [[row.texts[column.key] for column in columns] for row in rows]
    return aligned(table, [column.numeric for column in columns])


def aligned(table: Sequence[Sequence[str]], numeric: Sequence[bool]) -> list[str]:
    """Return a line for each row of `table`, its `numeric` columns to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        GAP.join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in table
    ]


# -- HTML ------------------------------------------------------------------------

# Styles are attributes: a notebook that is not trusted, somebody else's, loses a style
# sheet. Only variables with fallbacks, and greys that stand on white and on black, so
# that a table is legible in any theme and on a page that has none.
_BLOCK = (
    "font-family:var(--jp-ui-font-family,system-ui,sans-serif);"
    "font-size:var(--jp-ui-font-size1,13px);line-height:1.5;overflow-x:auto"
)
_TABLE = (
    "border-collapse:collapse;border:0;margin:.2em 0 .8em;font-size:inherit;"
    "color:inherit;font-variant-numeric:tabular-nums;table-layout:auto"
)
_CELL = "border:0;padding:1px 1em 1px 0;white-space:nowrap;text-align:"
_RULE = "1px solid var(--jp-border-color2,rgba(127,127,127,.4))"
_SECTION = f"border:0;border-top:{_RULE};padding:.4em 0 0;text-align:left"
_QUIET = "opacity:.75"
_ERROR = "color:var(--jp-error-color1,#d32f2f)"
# As pale as text in the colour of an error needs it.
_BLAMED = (
    "background:rgba(211,47,47,.06);"
    "border-left:3px solid var(--jp-error-color1,#d32f2f)"
)
_WORKING = "color:var(--jp-brand-color1,#1976d2)"
#: The mood of a row → its shape, as on the board, and the style of the shape.
_SHAPES = {
    "busy": ("●", _WORKING),
    "working": ("●", _WORKING),
    "warning": ("▲", "color:var(--jp-warn-color1,#f57c00)"),
    "error": ("■", _ERROR),
}


def block_html(parts: Sequence[str]) -> str:
    """Return an element with paragraphs and tables in it."""
    inside = "\n".join(filter(None, parts))
    return f'<div class="rankscope-static" style="{_BLOCK}">\n{inside}\n</div>'


def paragraph_html(html: str, quiet: bool = False) -> str:
    return f'<p style="margin:0 0 .35em{f";{_QUIET}" if quiet else ""}">{html}</p>'


def fold_html(title: str, html: str, opens: bool) -> str:
    """Return a part that opens and closes, also where a page is not trusted."""
    summary = f'<summary style="cursor:pointer;margin:.2em 0">{title}</summary>'
    return f"<details{' open' if opens else ''}>{summary}{html}</details>"


@functools.cache
def page_file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def style_of(name: str) -> str:
    return f"<style>\n{page_file(f'{name}.css')}</style>"


def trusted_html(html: str, otherwise: str = "") -> str:
    """Return `html` where a page is trusted, and else `otherwise`.

    Another page drops scripts, style sheets and the marks of an SVG, and leaves their
    words; it keeps what is hidden, if the attribute has a value.
    """
    if not html:
        return ""
    return (
        f'<div class="rankscope-trusted" hidden="hidden">{_TRUSTED}{html}</div>'
        f'<div class="rankscope-plain">{otherwise}</div>'
    )


_TRUSTED = (
    "<style>.rankscope-trusted[hidden] { display: block !important; }"
    " .rankscope-trusted + .rankscope-plain { display: none; }</style>"
)


def title_html(title: str, facts: Sequence[str] = (), is_error: bool = False) -> str:
    """Return a title in bold, and facts behind it."""
    about = "".join(f" · {escape(fact)}" for fact in facts)
    style = f' style="{_ERROR}"' if is_error else ""
    quiet = f'<span style="{_QUIET}">{about}</span>' if about else ""
    return f"<b{style}>{escape(title)}</b>{quiet}"


def table_html(columns: Sequence[Column], sections: Sequence[Section]) -> str:
    """Return a table with the columns' titles and a body for each section."""
    head = "".join(
        f'<th style="{_aligned(column)};font-weight:normal;{_QUIET}">'
        f"{column.title}</th>"
        for column in columns
    )
    bodies = "\n".join(_section(columns, section) for section in sections)
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead>\n{bodies}\n</table>'


def _section(columns: Sequence[Column], section: Section) -> str:
    found = []
    if section.title:
        found.append(
            f'<tr style="background:none"><th colspan="{len(columns)}" '
            f'style="{_SECTION};font-weight:normal">'
            f"{title_html(section.title, section.facts)}</th></tr>"
        )
    for row in section.rows:
        cells = "".join(_cell(column, row) for column in columns)
        style = _BLAMED if row.blamed else "background:none"
        found.append(f'<tr style="{style}">{cells}</tr>')
    found += [
        f'<tr style="background:none"><td></td><td colspan="{len(columns) - 1}" '
        f'style="{_CELL}left;white-space:normal;{_ERROR}">'
        f"{_shape('error')}{escape(note)}</td></tr>"
        for note in section.notes
    ]
    return "<tbody>" + "\n".join(found) + "</tbody>"


def _cell(column: Column, row: Row) -> str:
    shape = _shape(row.mood) if column.key == "state" else ""
    wrong = row.mood == "error" and column.key == "state"
    wrong |= row.blamed and column.key == "verdict"
    style = f"{_aligned(column)};{_ERROR}" if wrong else _aligned(column)
    return f'<td style="{style}">{shape}{escape(row.texts[column.key])}</td>'


def _aligned(column: Column) -> str:
    return f"{_CELL}{'right' if column.numeric else 'left'}"


def _shape(mood: str) -> str:
    shape, style = _SHAPES.get(mood, ("○", _QUIET))
    return f'<span aria-hidden="true" style="{style}">{shape}</span> '
