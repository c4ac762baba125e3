"""The board as text: for terminals, and wherever there is no front end."""

from __future__ import annotations

from collections.abc import Sequence

from .board_columns import COLUMNS, Column, shown
from .board_model import BoardModel, Group

__all__ = ["board_text"]

#: How much of the table is left out to fit, in this order.
_DROPS = (6, 5, 4, 3, 2, 1)
#: Rows that are shown of a group before those that are like the rest are left out.
_ROWS = 32


def board_text(model: BoardModel, width: int = 120) -> str:
    """Return the board in lines of at most `width` columns, where that can be."""
    head = model.head
    out = [" · ".join([head.get("title", "no ranks"), *head.get("facts", [])])]
    banner = model.banner()
    out.append(f"{banner.title}: {banner.text}")
    out += [f"  {sentence}" for sentence in banner.more]
    labels = [tab["label"] for tab in model.tabs()]
    facts = [tab["facts"] for tab in model.tabs()]
    for group, label, said in zip(model.groups, labels, facts, strict=True):
        out += ["", " · ".join([label, *said])]
        out += _table(group, model.now, width)
    return "\n".join(out)


def _table(group: Group, now: float, width: int) -> list[str]:
    rows = group.rows()
    chosen, hidden = _choose(group)
    texts = [shown(rank, rows[rank], now) for rank in chosen]
    columns = [
        column
        for column in COLUMNS
        # An empty column tells nothing here, and nothing will come into it.
        if any(row[column.key] for row in texts)
    ]
    if len({row["host"] for row in texts}) == 1:
        columns = [column for column in columns if column.key != "host"]
    for drop in (None, *_DROPS):
        if drop is not None:
            columns = [column for column in columns if column.drop < drop]
        lines = _lines(columns, texts)
        if max(map(len, lines)) <= width:
            break
    return lines + hidden


def _choose(group: Group) -> tuple[list[int], list[str]]:
    """The ranks to show: all, or the first ones and all that stand out."""
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


def _lines(columns: Sequence[Column], texts: Sequence[dict[str, str]]) -> list[str]:
    table = [{column.key: column.title for column in columns}, *texts]
    widths = [max(len(row[column.key]) for row in table) for column in columns]
    return [
        "  ".join(
            row[column.key].rjust(width)
            if column.numeric
            else row[column.key].ljust(width)
            for column, width in zip(columns, widths, strict=True)
        ).rstrip()
        for row in table
    ]
