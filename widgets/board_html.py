"""The board as static HTML: the last state, in a saved notebook."""

from __future__ import annotations

from html import escape

from .board_columns import COLUMNS, Column, shown
from .board_model import BoardModel, Group

__all__ = ["board_html"]

#: Rows of a group that a notebook keeps: the file is to stay small.
_ROWS = 64

# Only variables with fallbacks, and greys that stand on white and on black, so
# that it reads in any theme and on a page that has none. A page that takes the
# style away (it is not trusted) leaves a plain table.
_STYLE = """\
<style>
.rankscope-static {
  font-family: var(--jp-ui-font-family, system-ui, sans-serif);
  font-size: var(--jp-ui-font-size1, 13px); line-height: 1.5; overflow-x: auto;
}
.rankscope-static p { margin: 0 0 .35em; }
.rankscope-static .quiet { opacity: .75; }
.rankscope-static table, .jp-RenderedHTMLCommon .rankscope-static table {
  border-collapse: collapse; border: none; margin: .2em 0 .8em; font-size: inherit;
  color: inherit; font-variant-numeric: tabular-nums; table-layout: auto;
}
.jp-RenderedHTMLCommon .rankscope-static table tr { background: none; }
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
.rankscope-static .error, .jp-RenderedHTMLCommon .rankscope-static .error {
  color: var(--jp-error-color1, #d32f2f);
}
</style>"""


def board_html(model: BoardModel, when: str, name: str = "") -> str:
    """Return the state of `model` as HTML, with the time `when` it was so.

    `name` is a class of the outermost element: what a page finds it by.
    """
    head = model.head
    title, facts = head.get("title", "no ranks"), head.get("facts", [])
    said = " · ".join(escape(fact) for fact in [*facts, f"as of {when}"])
    banner = model.banner()
    mood = " class='error'" if banner.mood == "error" else ""
    sentences = " ".join(escape(sentence) for sentence in (banner.text, *banner.more))
    parts = [
        f'<div class="rankscope-board {escape(name)}"><div class="rankscope-static">',
        _STYLE,
        f"<p><b>{escape(title)}</b> <span class='quiet'>· {said}</span></p>",
        f"<p><b{mood}>{escape(banner.title)}</b> {sentences}</p>",
    ]
    for group, tab in zip(model.groups, model.tabs(), strict=True):
        about = "".join(f" · {escape(fact)}" for fact in tab["facts"])
        parts.append(
            f"<p><b>{escape(tab['label'])}</b><span class='quiet'>{about}</span></p>"
        )
        parts.append(_table(group, model.now))
    return "\n".join([*parts, "</div></div>"])


def _table(group: Group, now: float) -> str:
    rows = list(group.rows().items())[:_ROWS]
    texts = [(shown(rank, row, now), row["mood"]) for rank, row in rows]
    columns = [
        column for column in COLUMNS if any(cells[column.key] for cells, _ in texts)
    ]
    head = "".join(f"<th{_class(column)}>{column.title}</th>" for column in columns)
    body = "\n".join(_row(columns, cells, str(mood)) for cells, mood in texts)
    left = len(group.base) - len(rows)
    more = f"<p class='quiet'>and {left} more ranks</p>" if left else ""
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>{more}"
    )


def _row(columns: list[Column], cells: dict[str, str], mood: str) -> str:
    found = []
    for column in columns:
        names = ["number"] if column.numeric else []
        if column.key in ("state", "verdict") and mood == "error":
            names.append("error")
        kind = f" class='{' '.join(names)}'" if names else ""
        found.append(f"<td{kind}>{escape(cells[column.key])}</td>")
    return f"<tr>{''.join(found)}</tr>"


def _class(column: Column) -> str:
    return " class='number'" if column.numeric else ""
