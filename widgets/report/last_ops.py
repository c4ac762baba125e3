"""The last ops of each group: who has issued and completed which.

Drawn over sequence numbers, not over time: the clocks of two ranks cannot be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rankscope.backends.observe.evidence import Evidence, Group, GroupEvidence, IssuedOp
from rankscope.backends.rank_sets import group_by

__all__ = ["Cell", "GroupOps", "last_ops"]

#: Ops of a group that are shown.
_LAST = 8


class Cell(NamedTuple):
    """One op on one rank: the state as a CSS class, and as a word."""

    kind: str
    word: str
    #: The op's name if it is not that of most ranks.
    other: str = ""


_DONE, _WAITS = Cell("done", "done"), Cell("waits", "waits")
_MISSING = Cell("missing", "not issued")
_UNKNOWN, _OLDER = Cell("unknown", "not known"), Cell("issued", "issued")


class GroupOps(NamedTuple):
    """The last collectives of a group, and its last sends and receives."""

    group: Group
    #: Sequence number → the name of the op, that of most ranks.
    columns: Mapping[int, str]
    #: Ranks that are alike, and their cells.
    rows: Sequence[tuple[tuple[int, ...], tuple[Cell, ...]]]
    #: Whether an op is in flight.
    hangs: bool

    @property
    def differs(self) -> bool:
        return len(self.rows) > 1


def last_ops(evidence: Evidence, first: Collection[str] = ()) -> list[GroupOps]:
    """Return the groups that have ops: first those that hang and are named `first`."""
    found = [
        one
        for group in evidence.groups
        if (one := _of_group(group, evidence)) is not None
    ]
    return sorted(
        found,
        key=lambda one: (
            not one.hangs,
            one.group.name not in first,
            not one.differs,
            one.group.name,
            one.group.ranks,
        ),
    )


def _of_group(group: Group, evidence: Evidence) -> GroupOps | None:
    known = {
        rank: evidence.ranks[rank].groups.get(group)
        for rank in group.ranks
        if rank in evidence.ranks
    }
    by_rank: dict[int, dict[int, IssuedOp]] = {}
    names: dict[int, Counter[str]] = {}
    for rank, one in known.items():
        for op in () if one is None else one.ops:
            if op.is_p2p:
                continue
            by_rank.setdefault(rank, {})[op.seq] = op
            names.setdefault(op.seq, Counter())[op.op] += 1
    numbers = sorted(names)
    in_flight = [
        seq for ops in by_rank.values() for seq, op in ops.items() if op.in_flight
    ]
    if not numbers:
        return None
    # Around the op that hangs first: ranks may have issued many after it.
    last = min(in_flight) + 1 if in_flight else numbers[-1]
    shown = [seq for seq in numbers if seq <= last][-_LAST:]
    columns = {seq: names[seq].most_common(1)[0][0] for seq in shown}

    def cells_of(rank: int) -> tuple[Cell, ...]:
        ops = by_rank.get(rank, {})
        return tuple(
            _cell(seq, name, ops.get(seq), known.get(rank), min(ops, default=None))
            for seq, name in columns.items()
        )

    alike = group_by(group.ranks, cells_of)
    rows = [(tuple(ranks), cells) for cells, ranks in alike.items()]
    return GroupOps(group, columns, rows, bool(in_flight))


def _cell(
    seq: int,
    name: str,
    op: IssuedOp | None,
    known: GroupEvidence | None,
    oldest: int | None,
) -> Cell:
    progress = None if known is None else known.progress
    if op is not None:
        cell = _WAITS if op.in_flight else _DONE
        if op.state == "unknown" and not op.in_flight:
            cell = _OLDER
        if op.state == "unknown" and progress is not None:
            cell = _DONE if seq <= (progress.completed or 0) else cell
        return cell if op.op == name else cell._replace(other=op.op)
    if known is None or progress is None:
        return _UNKNOWN
    if progress.completed is not None and seq <= progress.completed:
        return _DONE
    if progress.enqueued is not None:
        return _OLDER if seq <= progress.enqueued else _MISSING
    # Older than what its ring still has.
    if known.lists_all and (oldest is None or seq > oldest):
        return _MISSING
    return _UNKNOWN
