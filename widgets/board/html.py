"""The board as static HTML: the last state, in a saved notebook."""

from __future__ import annotations

from html import escape

from ..tables import STYLE, Section, table_html
from ..wait_graph import folded
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
    about = " · ".join(escape(fact) for fact in [*facts, f"as of {when}"])
    banner = model.banner()
    mood = " class='error'" if banner.mood == "error" else ""
    sentences = " ".join(map(escape, banner.sentences))
    parts = [
        f'<div class="rankscope-board {escape(name)}"><div class="rankscope-static">',
        STYLE,
        f"<p><b>{escape(title)}</b> <span class='quiet'>· {about}</span></p>",
        f"<p><b{mood}>{escape(banner.title)}</b> {sentences}</p>",
        folded(banner.picture),
    ]
    if head.get("state") == "running":
        parts.append(f"<p class='quiet'>{_about_picture(banner.mood)}</p>")
    for group, tab in zip(model.groups, model.tabs(), strict=True):
        more = "".join(f" · {escape(fact)}" for fact in tab["facts"])
        parts.append(
            f"<p><b>{escape(tab['label'])}</b><span class='quiet'>{more}</span></p>"
        )
        parts.append(_table(group, model.now))
    return "\n".join([*parts, "</div></div>"])


def hang_html(text: str, name: str, picture: str = "") -> str:
    """Return why a cell hangs; a bar of the board `name` takes the place of `text`."""
    about = f'<div class="{escape(name)}-hang"><p>{escape(text)}</p></div>'
    return f"{about}{folded(picture)}"


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
    more = f'<p class="quiet">and {left} more ranks</p>' if left else ""
    return table_html(columns, [Section(tuple(rows))]) + more
