"""Tables as text and as HTML: those of the board and of the status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = [
    "STYLE",
    "Column",
    "Row",
    "Section",
    "aligned",
    "fitting",
    "lines",
    "table_html",
]


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
    chosen = list(columns)
    for drop in sorted({column.drop for column in columns} - {0}, reverse=True):
        if max(map(len, lines(chosen, rows))) <= width:
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
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in table
    ]


# -- HTML ------------------------------------------------------------------------

#: For tables inside an element of class ``rankscope-static``. Only variables with
#: fallbacks, and greys that stand on white and on black, so that a table is legible
#: in any theme and on a page that has none. A page that is not trusted loses the
#: style: a plain table remains.
STYLE = """\
<style>
.rankscope-static {
  font-family: var(--jp-ui-font-family, system-ui, sans-serif);
  font-size: var(--jp-ui-font-size1, 13px); line-height: 1.5; overflow-x: auto;
}
.rankscope-static p { margin: 0 0 .35em; }
.rankscope-static .quiet { opacity: .75; }
.rankscope-static b { font-weight: 600; }
.rankscope-static table, .jp-RenderedHTMLCommon .rankscope-static table {
  border-collapse: collapse; border: none; margin: .2em 0 .8em; font-size: inherit;
  color: inherit; font-variant-numeric: tabular-nums; table-layout: auto;
}
.rankscope-static table tr, .jp-RenderedHTMLCommon .rankscope-static table tr {
  background: none;
}
.rankscope-static table :is(th, td),
.jp-RenderedHTMLCommon .rankscope-static table :is(th, td) {
  padding: .1em 1em .1em 0; border: none; text-align: left; white-space: nowrap;
  font-weight: normal; vertical-align: baseline; max-width: none;
}
.rankscope-static table thead th { opacity: .75; }
.rankscope-static table :is(th, td).number,
.jp-RenderedHTMLCommon .rankscope-static table :is(th, td).number {
  text-align: right;
}
.rankscope-static table tbody th,
.jp-RenderedHTMLCommon .rankscope-static table tbody th {
  border-top: 1px solid var(--jp-border-color2, rgba(127, 127, 127, .4));
  padding-top: .35em;
}
.rankscope-static table tbody + tbody th,
.jp-RenderedHTMLCommon .rankscope-static table tbody + tbody th {
  padding-top: .8em;
}
.rankscope-static .dot {
  display: inline-block; width: .55em; height: .55em; border-radius: 50%;
  margin-right: .5em; border: 1px solid currentColor; box-sizing: border-box;
}
.rankscope-static .calm .dot { opacity: .45; }
.rankscope-static :is(.busy, .working) .dot {
  color: var(--jp-brand-color1, #1976d2); background: currentColor;
}
.rankscope-static .warning .dot {
  color: var(--jp-warn-color1, #f57c00); background: currentColor;
}
.rankscope-static .error .dot { background: currentColor; }
.rankscope-static b.error, .jp-RenderedHTMLCommon .rankscope-static b.error,
.rankscope-static .error :is(.state, .verdict, .note),
.jp-RenderedHTMLCommon .rankscope-static .error :is(.state, .verdict, .note) {
  color: var(--jp-error-color1, #d32f2f);
}
</style>"""

_DOT = '<span class="dot"></span>'


def table_html(columns: Sequence[Column], sections: Sequence[Section]) -> str:
    """Return a table with the columns' titles and a body for each section."""
    head = "".join(f"<th{_class(column)}>{column.title}</th>" for column in columns)
    bodies = "\n".join(_section(columns, section) for section in sections)
    return f"<table><thead><tr>{head}</tr></thead>\n{bodies}\n</table>"


def _section(columns: Sequence[Column], section: Section) -> str:
    found = []
    if section.title:
        facts = "".join(f" · {escape(fact)}" for fact in section.facts)
        found.append(
            f'<tr><th colspan="{len(columns)}"><b>{escape(section.title)}</b>'
            f'<span class="quiet">{facts}</span></th></tr>'
        )
    for row in section.rows:
        cells = "".join(_cell(column, row.texts[column.key]) for column in columns)
        found.append(f'<tr class="{escape(row.mood)}">{cells}</tr>')
    found += [
        f'<tr class="error"><td></td><td class="note" colspan="{len(columns) - 1}">'
        f"{_DOT}{escape(note)}</td></tr>"
        for note in section.notes
    ]
    return "<tbody>" + "\n".join(found) + "</tbody>"


def _cell(column: Column, text: str) -> str:
    dot = _DOT if column.key == "state" else ""
    return f"<td{_class(column)}>{dot}{escape(text)}</td>"


def _class(column: Column) -> str:
    names = ["number"] if column.numeric else []
    if column.key in ("state", "verdict"):
        names.append(column.key)
    return f' class="{" ".join(names)}"' if names else ""
