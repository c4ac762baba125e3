"""The board as static HTML: the last state, in a saved notebook."""

from __future__ import annotations

from html import escape
from typing import Any

from ..absence_graph import in_fold
from ..tables import (
    Section,
    block_html,
    fold_html,
    paragraph_html,
    table_html,
    title_html,
    trusted_html,
)
from .columns import shown_of
from .group import Group
from .model import BoardModel

__all__ = ["board_html", "hang_html"]

#: Rows of a group that a notebook keeps, so that its file stays small; equal ranks are
#: one, and those at fault come first.
_ROWS = 64
#: Groups with a table; the others have a line.
_GROUPS = 16
#: Columns that would push the verdict out of sight: `drop` is as high, or higher.
_DROP = 7
#: As on the board, whatever the output of a cell has.
_SUMMARY = "cursor:pointer;font-size:12px;opacity:.75"
#: JupyterLab breaks lines within words, also where there is room for none: here those
#: of errors, and of the text above a board.
_LINES = (
    '<style>.jp-RenderedText[data-mime-type="application/vnd.jupyter.stderr"] pre, '
    ".jp-OutputArea:has(.rankscope-board) .jp-RenderedText pre "
    "{ word-break: normal; overflow-wrap: anywhere; }</style>"
)
#: The states of groups that come first.
_FIRST = ("hung", "aborted", "rank dead", "no answer", "in flight")


def board_html(model: BoardModel, when: str, name: str = "") -> str:
    """Return the state of `model` at the time `when` as HTML."""
    head = model.head
    title, facts = head.get("title", "no ranks"), head.get("facts", [])
    banner = model.banner()
    said = title_html(banner.title, is_error=banner.mood == "error")
    sentences = " ".join(map(escape, banner.sentences))
    parts = [
        paragraph_html(title_html(title, [*facts, f"as of {when}"])),
        paragraph_html(f"{said} {sentences}"),
        trusted_html(in_fold(banner.picture, banner.opens, _SUMMARY)),
    ]
    if head.get("state") == "running":
        parts.append(paragraph_html(_about_picture(banner.mood), quiet=True))
    parts += [*_groups(model), trusted_html(_LINES)]
    return f'<div class="rankscope-board {escape(name)}">{block_html(parts)}</div>'


def hang_html(
    text: str, name: str, when: str, cell: int, picture: str = "", opens: bool = False
) -> str:
    """Return why a cell hung at `when`; a bar of the board `name` replaces `text`."""
    said = f"<p>As of {when}: {escape(text)}</p>"
    drawn = trusted_html(in_fold(picture, opens, _SUMMARY))
    # Of the attributes of an output that is not trusted, pages keep this one.
    classes = f"{escape(name)}-hang rankscope-cell-{cell}"
    return f'<div class="{classes}"><div>{said}{drawn}</div></div>'


def _about_picture(mood: str) -> str:
    """Return what the picture is, and what to do where no live board replaces it."""
    about = "This is a picture: in a page, while its kernel runs, the board is live."
    if mood in ("busy", "working", "error"):
        about += (
            " If a hang keeps it from that: <code>rankscope abort</code> in a terminal."
        )
    return about


def _groups(model: BoardModel) -> list[str]:
    """Return a table for each group; of several, those in trouble first and open."""
    pairs = [
        (group, tab)
        for group, tab in zip(model.groups, model.tabs(), strict=True)
        if not tab["copy"]
    ]
    causes = model.banner().groups

    def place(pair: tuple[Group, dict[str, Any]]) -> int:
        group, tab = pair
        if group.id in causes:
            return causes.index(group.id) - len(causes)
        state = tab["state"]
        return _FIRST.index(state) if state in _FIRST else len(_FIRST)

    found = []
    for number, (group, tab) in enumerate(sorted(pairs, key=place)):
        if len(pairs) == 1:
            title = title_html(tab["label"], tab["facts"])
            return [paragraph_html(title), _table(group, model.now)]
        told = [tab["state"], *filter(None, [tab["verdict"]]), *tab["facts"]]
        title = title_html(tab["label"], told, is_error=tab["mood"] == "error")
        if number < _GROUPS:
            table = _table(group, model.now)
            found.append(fold_html(title, table, opens=number == 0))
        else:
            found.append(paragraph_html(title))
    return found


def _table(group: Group, now: float) -> str:
    columns, rows, left = shown_of(group.rows(), now, _ROWS)
    # Not where a narrow page cuts them off.
    first = ("rank", "host", "state", "verdict", "op")
    columns = [column for column in columns if column.drop < _DROP]
    columns.sort(key=lambda one: one.key not in first)
    more = paragraph_html(left, quiet=True) if left else ""
    return table_html(columns, [Section(tuple(rows))]) + more
