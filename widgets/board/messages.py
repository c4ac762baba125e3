"""Sends and receives: how they are called, and which belong together.

Records number them per group and rank, not per pair of ranks. The k-th send of a rank
to another with a tag belongs to the k-th receive of that one from it, if all that both
have issued are known. Where records are lost, nothing is said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from rankscope.backends.observe.records import Record, sequence_number

__all__ = ["op_text", "pair", "tag_of"]

T = TypeVar("T")

_ARROWS = {"send": "→", "recv": "←"}

#: A sender, a receiver, and the tag.
_Way = tuple[int, int, int | None]


def op_text(op: str, others: Sequence[int], tag: int | None) -> str:
    """Return the name of an op; ``send → 2 tag 0`` of a send to the global rank 2."""
    if op not in _ARROWS:
        return op
    parts = [op]
    if others:
        parts += [_ARROWS[op], ", ".join(map(str, others))]
    if tag is not None:
        parts.append(f"tag {tag}")
    return " ".join(parts)


def tag_of(record: Record) -> int | None:
    """Return the tag of a send or receive: NCCL has none, it matches in order."""
    return None if record["backend"] == "nccl" else record.get("tag")


def pair(
    members: Sequence[int], issued: Mapping[int, Sequence[tuple[Record, T]]]
) -> list[tuple[int, int, T | None, T | None]]:
    """Return sender, receiver, send and receive of the messages of one group.

    `issued` maps the global ranks that are known to the sends and receives of one
    generation, in the order of issue, each with what stands for it in the result.
    ``None``: that rank has not issued the other side.
    """
    sides: dict[_Way, tuple[list[T], list[T]]] = defaultdict(lambda: ([], []))
    # Receivers that take a message of any rank, with the tag.
    from_any: set[tuple[int, int | None]] = set()
    whole = {rank for rank, ops in issued.items() if _is_whole(ops)}
    for rank in sorted(whole):
        for record, one in issued[rank]:
            tag = tag_of(record)
            if record["peer"] is None:
                from_any.add((rank, tag))
                continue
            other = members[record["peer"]]
            receives = record["op"] == "recv"
            way = (other, rank, tag) if receives else (rank, other, tag)
            sides[way][receives].append(one)
    found = []
    for (sender, receiver, tag), (sends, receives) in sides.items():
        if not {sender, receiver} <= whole or (receiver, tag) in from_any:
            continue
        for place in range(max(len(sends), len(receives))):
            send = sends[place] if place < len(sends) else None
            receive = receives[place] if place < len(receives) else None
            found.append((sender, receiver, send, receive))
    return found


def _is_whole(ops: Sequence[tuple[Record, object]]) -> bool:
    """Return whether no number from 1 to the last one is missing."""
    numbers = {sequence_number(record) for record, _ in ops}
    return len(numbers) == max(numbers, default=0)
