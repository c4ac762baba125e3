"""The board as static HTML: the last state, in a saved notebook."""

from __future__ import annotations

from html import escape

from ..absence_graph import in_fold
from ..tables import Section, block_html, paragraph_html, table_html, title_html
from .columns import COLUMNS, shown
from .group import Group
from .model import BoardModel

__all__ = ["board_html", "hang_html"]

#: Rows of a group that a notebook keeps, so that its file stays small.
_ROWS = 64


def board_html(model: BoardModel, when: str, name: str = "") -> str:
    """Return the state of `model` at the time `when` as HTML.

    `name` is a class of the outermost element, by which the page finds it.
    """
    head = model.head
    title, facts = head.get("title", "no ranks"), head.get("facts", [])
    banner = model.banner()
    said = title_html(banner.title, is_error=banner.mood == "error")
    sentences = " ".join(map(escape, banner.sentences))
    parts = [
        paragraph_html(title_html(title, [*facts, f"as of {when}"])),
        paragraph_html(f"{said} {sentences}"),
        in_fold(banner.picture, banner.opens),
    ]
    if head.get("state") == "running":
        parts.append(paragraph_html(_about_picture(banner.mood), quiet=True))
    for group, tab in zip(model.groups, model.tabs(), strict=True):
        parts.append(paragraph_html(title_html(tab["label"], tab["facts"])))
        parts.append(_table(group, model.now))
    return f'<div class="rankscope-board {escape(name)}">{block_html(parts)}</div>'


def hang_html(text: str, name: str, picture: str = "", opens: bool = False) -> str:
    """Return why a cell hangs; a bar of the board `name` takes the place of `text`."""
    about = f'<div class="{escape(name)}-hang"><p>{escape(text)}</p></div>'
    return f"{about}{in_fold(picture, opens)}"


def _about_picture(mood: str) -> str:
    """Return what the picture is, and what to do where no live board replaces it."""
    about = "This is a picture; the live board takes its place where a kernel answers."
    if mood in ("busy", "working", "error"):
        about += (
            " If a hang keeps it from that: <code>rankscope abort</code> in a terminal."
        )
    return about


def _table(group: Group, now: float) -> str:
    ranks = list(group.rows().items())[:_ROWS]
    rows = [shown(rank, row, now) for rank, row in ranks]
    columns = [
        column for column in COLUMNS if any(row.texts[column.key] for row in rows)
    ]
    left = len(group.base) - len(rows)
    more = paragraph_html(f"and {left} more ranks", quiet=True) if left else ""
    return table_html(columns, [Section(tuple(rows))]) + more
