"""The board as text: for terminals, and where there is no front end."""

from __future__ import annotations

from ..tables import fitting, lines
from .arrange import View, arrange
from .columns import columns_of, shown_item
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
    rows = group.rows()
    items = arrange(rows, View())
    table = [shown_item(item, rows, now) for item in items[:_ROWS]]
    columns = [
        column
        for column in columns_of(rows.values())
        # This text does not change: an empty column stays empty.
        if any(row.texts[column.key] for row in table)
    ]
    left = sum(len(item.ranks) for item in items[_ROWS:])
    more = [f"… and {left} more ranks"] if left else []
    return lines(fitting(columns, table, width), table) + more
