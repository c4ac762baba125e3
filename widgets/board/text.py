"""The board as text: for terminals, and where there is no front end."""

from __future__ import annotations

from ..tables import fitting, lines
from .columns import shown_of
from .group import Group
from .model import BoardModel

__all__ = ["board_text"]

#: Rows of a group; equal ranks are one, and those at fault come first.
_ROWS = 32


def board_text(model: BoardModel, width: int = 120) -> str:
    """Return the board in lines of at most `width` characters, where possible."""
    head = model.head
    out = [" · ".join([head.get("title", "no ranks"), *head.get("facts", [])])]
    banner = model.banner()
    out.append(f"{banner.title}: {banner.text}")
    out += [f"  {sentence}" for sentence in banner.sentences[1:]]
    labels = [tab["label"] for tab in model.tabs()]
    tab_facts = [tab["facts"] for tab in model.tabs()]
    for group, label, facts in zip(model.groups, labels, tab_facts, strict=True):
        out += ["", " · ".join([label, *facts])]
        out += _table(group, model.now, width)
    return "\n".join(out)


def _table(group: Group, now: float, width: int) -> list[str]:
    columns, rows, left = shown_of(group.rows(), now, _ROWS)
    return lines(fitting(columns, rows, width), rows) + ([f"… {left}"] if left else [])
