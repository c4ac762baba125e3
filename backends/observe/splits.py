"""Splits: what each rank of an all-to-all sends to another, which expects it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ..rank_sets import name_ranks
from ..work.op_type import OpType
from .records import Record, where

__all__ = ["Disagreement", "describe_disagreements", "disagreements", "those_at_fault"]

#: Disagreements that a text has; the rest is counted.
NAMED = 3


class Disagreement(NamedTuple):
    """Global ranks, and the parts that one sends and the other expects."""

    sender: int
    receiver: int
    sent: int
    expected: int


def disagreements(
    entries: Mapping[int, Record], group: Sequence[int]
) -> list[Disagreement]:
    """Return where ranks of an all-to-all expect other sizes than they are sent.

    `entries` has the op of each rank that has entered; `group` the global ranks of the
    group, in the order of their ranks in it.
    """
    parts = {rank: _parts(entry, len(group)) for rank, entry in entries.items()}
    return list(_compare(parts, group))


def _compare(
    parts: Mapping[int, tuple[Sequence[int], Sequence[int]] | None],
    group: Sequence[int],
) -> Iterator[Disagreement]:
    for i, sender in enumerate(group):
        for j, receiver in enumerate(group):
            ours, theirs = parts.get(sender), parts.get(receiver)
            if ours is None or theirs is None:
                continue
            sent, expected = ours[1][j], theirs[0][i]
            if sent != expected:
                yield Disagreement(sender, receiver, sent, expected)


def _parts(entry: Record, size: int) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return what a rank receives from and sends to each rank, if it is known."""
    sizes = entry["sizes"]
    if entry["op"] == OpType.ALL_TO_ALL.value and len(sizes) == 2 * size:
        counts = [prod(one) for one in sizes]
        return counts[size:], counts[:size]
    splits = entry.get("splits")
    if entry["op"] != OpType.ALL_TO_ALL_SINGLE.value or not splits or len(sizes) != 2:
        return None
    receives, sends = splits
    return (
        receives or [sizes[1][0] // size] * size,
        sends or [sizes[0][0] // size] * size,
    )


def those_at_fault(found: Sequence[Disagreement]) -> list[int]:
    """Return the ranks that take part in most of the disagreements."""
    counts = Counter(one.sender for one in found)
    counts.update(one.receiver for one in found)
    most = max(counts.values())
    return sorted(rank for rank, count in counts.items() if count == most)


def describe_disagreements(
    found: Sequence[Disagreement], entries: Mapping[int, Record]
) -> str:
    """Return ``rank 2 sends 2 rows to rank 0, which expects 1, at cell 7 line 4 …``."""
    entry = next(iter(entries.values()))
    unit = "elements" if entry["op"] == OpType.ALL_TO_ALL.value else "rows"
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
    ranks = {rank for one in found for rank in (one.sender, one.receiver)}
    place = where(entries[rank] for rank in sorted(ranks))
    return f"{'; '.join(clauses)}, at {place}"
