"""Splits: what each rank of an all-to-all sends to another, which expects it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...rank_sets import name_ranks
from ..evidence import IssuedOp

__all__ = ["Disagreement", "disagreements", "tell", "those_at_fault"]

#: Disagreements that a text has; the rest is counted.
NAMED = 3


class Disagreement(NamedTuple):
    """Global ranks, and the parts that one sends and the other expects."""

    sender: int
    receiver: int
    sent: int
    expected: int


def disagreements(
    ops: Mapping[int, IssuedOp], group: Sequence[int]
) -> Iterator[Disagreement]:
    """Yield where ranks of an all-to-all expect other sizes than they are sent.

    `ops` has the op of each rank that has entered; `group` the global ranks of the
    group, in the order of their ranks in it.
    """
    for i, sender in enumerate(group):
        for j, receiver in enumerate(group):
            ours = ops[sender].splits if sender in ops else None
            theirs = ops[receiver].splits if receiver in ops else None
            if ours is None or theirs is None:
                continue
            sent, expected = ours[1][j], theirs[0][i]
            if sent != expected:
                yield Disagreement(sender, receiver, sent, expected)


def those_at_fault(found: Sequence[Disagreement]) -> tuple[int, ...]:
    """Return the ranks that take part in most of the disagreements."""
    counts = Counter(one.sender for one in found)
    counts.update(one.receiver for one in found)
    most = max(counts.values())
    return tuple(sorted(rank for rank, count in counts.items() if count == most))


def tell(found: Sequence[Disagreement], op: str) -> str:
    """Return ``rank 2 sends 2 rows to rank 0, which expects 1``."""
    unit = "elements" if op == "all_to_all" else "rows"
    # What one rank sends to several that expect the same is one clause.
    alike: dict[tuple[int, int, int], list[int]] = {}
    for one in found:
        key = (one.sender, one.sent, one.expected)
        alike.setdefault(key, []).append(one.receiver)
    clauses = []
    for (sender, sent, expected), receivers in alike.items():
        expect = "expects" if len(receivers) == 1 else "expect"
        clauses.append(
            f"rank {sender} sends {sent} {unit} to {name_ranks(receivers)}, which "
            f"{expect} {expected}"
        )
    if len(clauses) > NAMED:
        left = len(clauses) - NAMED
        clauses[NAMED:] = [f"and {left} more that disagree"]
    return "; ".join(clauses)
