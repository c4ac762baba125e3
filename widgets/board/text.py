"""The board as text: for terminals, and where there is no front end."""

from __future__ import annotations

from ..tables import fitting, lines
from .columns import COLUMNS, shown
from .group import Group
from .model import BoardModel

__all__ = ["board_text"]

#: Rows of a group up to which all are shown; above, inconspicuous ones are left out.
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
    chosen, hidden = _choose(group)
    table = [shown(rank, rows[rank], now) for rank in chosen]
    columns = [
        column
        for column in COLUMNS
        # This text does not change: an empty column stays empty.
        if any(row.texts[column.key] for row in table)
    ]
    if len({row.texts["host"] for row in table}) == 1:
        columns = [column for column in columns if column.key != "host"]
    return lines(fitting(columns, table, width), table) + hidden


def _choose(group: Group) -> tuple[list[int], list[str]]:
    """Return the ranks to show: all, or the first and the conspicuous ones."""
    ranks = sorted(group.base)
    if len(ranks) <= _ROWS:
        return ranks, []
    chosen = [
        rank
        for place, rank in enumerate(ranks)
        if place < _ROWS // 2 or _stands_out(group, rank)
    ][:_ROWS]
    return chosen, [f"… and {len(ranks) - len(chosen)} more ranks"]


def _stands_out(group: Group, rank: int) -> bool:
    row = group.row(rank)
    return row["mood"] in ("error", "warning") or "lag" in row or "blame" in row
