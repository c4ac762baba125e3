"""Pieces of the page: all text of files goes through `text`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from rankscope.backends.printable import printable
from rankscope.backends.rank_sets import name_ranks

__all__ = ["fold", "mark", "op_name", "prose", "ranks_html", "text"]

#: Characters of one text from a file at most.
LONGEST = 400
#: Characters of a list of ranks that a cell shows; a fold has the rest.
_RANKS = 60
#: Characters of the name of an op that stands in one line.
_OP = 16
_RANGE = re.compile(r"\d+–\d+")


def text(value: object, longest: int = LONGEST) -> str:
    """Return what a file says, without effect in a page or on the direction of text."""
    found = printable(str(value))
    if len(found) > longest:
        found = f"{found[: longest // 2]} … {found[-longest // 2 :]}"
    return escape(found, quote=True)


def prose(value: object, longest: int = LONGEST) -> str:
    """Return a sentence in which no line ends within ``0–4``."""
    return _RANGE.sub(r'<span class="nowrap">\g<0></span>', text(value, longest))


def op_name(name: str) -> str:
    """Return the name of an op; a long one may be broken between its words."""
    if len(name) <= _OP:
        return f'<span class="nowrap">{text(name)}</span>'
    return text(name, 60).replace("_", "_<wbr>")


def mark(mood: str, word: str) -> str:
    """Return a state: a shape with a colour, and the word for it."""
    return f'<span class="state {mood}"><i aria-hidden="true"></i>{text(word)}</span>'


def ranks_html(ranks: Sequence[int]) -> str:
    """Return ``ranks 0–3, 5``; of a long list its beginning, and the rest in a fold."""
    named = name_ranks(ranks)
    if len(named) <= _RANKS:
        return f"<b>{prose(named)}</b>"
    return fold(
        f"<b>{len(ranks):,} ranks</b>", f'<p class="list" tabindex="0">{named}</p>'
    )


def fold(head: str, body: str) -> str:
    """Return a part that can be opened; `head` and `body` are HTML."""
    return f"<details><summary>{head}</summary>{body}</details>"
