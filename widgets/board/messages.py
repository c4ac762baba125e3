"""Sends and receives: how they are called, and which belong together.

The k-th send of a rank to another with a tag belongs to the k-th receive of that one
from it. Our own records say which one it is. Others number them per group and rank, and
are counted here, if all that the rank has issued are known; else nothing is said.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from rankscope.backends.observe.records import Record, sequence_number, tag_of

__all__ = ["op_text", "pair"]

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


def pair(
    members: Sequence[int], issued: Mapping[int, Sequence[tuple[Record, T]]]
) -> list[tuple[int, int, T | None, T | None]]:
    """Return sender, receiver, send and receive of the messages of one group.

    `issued` maps the global ranks that are known to the sends and receives of one
    generation, in the order of issue, each with what stands for it in the result.
    ``None``: that rank has not issued the other side.
    """
    sides: dict[_Way, tuple[dict[int, T], dict[int, T]]]
    sides = defaultdict(lambda: ({}, {}))
    # Receivers that take a message of any rank, with the tag.
    from_any: set[tuple[int, int | None]] = set()
    whole = {rank for rank, ops in issued.items() if _is_whole(ops)}
    for rank, ops in issued.items():
        for record, one in ops:
            tag, number = tag_of(record), record.get("message")
            if record["peer"] is None or number == 0:
                from_any.add((rank, tag))
                continue
            receives = record["op"] == "recv"
            other = members[record["peer"]]
            way = (other, rank, tag) if receives else (rank, other, tag)
            if number is None and rank in whole:
                number = len(sides[way][receives]) + 1
            if number is not None:
                sides[way][receives][number] = one
    found = []
    for (sender, receiver, tag), (sends, received) in sides.items():
        if (receiver, tag) in from_any or not {sender, receiver} <= issued.keys():
            continue
        # What is behind the last one that is known was not issued.
        last_sent = max(sends, default=0 if sender in whole else math.inf)
        last_received = max(received, default=0 if receiver in whole else math.inf)
        for number in sorted(sends.keys() | received.keys()):
            send, receive = sends.get(number), received.get(number)
            lost = send is None and number < last_sent
            lost = lost or (receive is None and number < last_received)
            if not lost:
                found.append((sender, receiver, send, receive))
    return found


def _is_whole(ops: Sequence[tuple[Record, object]]) -> bool:
    """Return whether no number from 1 to the last one is missing."""
    numbers = {sequence_number(record) for record, _ in ops}
    return len(numbers) == max(numbers, default=0)
