"""Functions on flight-recorder records as plain data, shared by all readers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

from ..work.op_type import OpType

__all__ = [
    "Record",
    "backend_calls",
    "common_numbers",
    "position",
    "sequence_number",
    "splits_of",
    "tag_of",
]

#: One op, as `rankscope.backends.observe.export.local_dump` returns it.
Record = Mapping[str, Any]


def sequence_number(record: Record) -> int:
    """Return the number of an op in its group: its collective or its p2p number."""
    return record["p2p_seq_id"] if record["is_p2p"] else record["collective_seq_id"]


def tag_of(record: Record) -> int | None:
    """Return the tag of a send or receive: NCCL has none, it matches in order."""
    return None if record["backend"] == "nccl" else record.get("tag")


def splits_of(record: Record, size: int) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return what a rank receives from and sends to each rank, if it is known."""
    sizes = record["sizes"]
    if record["op"] == OpType.ALL_TO_ALL.value and len(sizes) == 2 * size:
        counts = [prod(one) for one in sizes]
        return counts[size:], counts[:size]
    splits = record.get("splits")
    if record["op"] != OpType.ALL_TO_ALL_SINGLE.value or not splits or len(sizes) != 2:
        return None
    receives, sends = splits
    return (
        receives or [sizes[1][0] // size] * size,
        sends or [sizes[0][0] // size] * size,
    )


def position(record: Record) -> tuple[int, int]:
    """Return the place of a collective among those of its group; the least is first.

    Torch does not count its monitored barriers: each has the number of the collective
    before it, and ``uncounted_id`` counts them. Other ops have no such key, or 0.
    """
    return record["collective_seq_id"], record.get("uncounted_id", 0)


def common_numbers(records: Iterable[Record]) -> list[int]:
    """Return numbers of the ops of one group, oldest first, that no two ops share.

    Those of collectives count the monitored barriers before them, too: see `position`.
    """
    records = list(records)
    barriers = (one["uncounted_id"] for one in records if one.get("uncounted_id"))
    # The ring may have lost the first ones.
    count = next(barriers, 1) - 1
    found = []
    for one in records:
        count = one.get("uncounted_id") or count
        found.append(sequence_number(one) + (0 if one["is_p2p"] else count))
    return found


def backend_calls(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the records in order; ops that one backend call ran are one list.

    The dispatcher numbers a group's ops, and the ring keeps them in this order.
    """
    for _, run in groupby(records, _one_call):
        yield list(run)


def _one_call(record: Record) -> tuple[Any, ...]:
    """Return a key that is equal for the ops of a batch that one call ran."""
    return (
        record["group_id"],
        record["generation"],
        record["op"],
        sequence_number(record),
        record["time_started_ns"],
        record["time_ended_ns"],
    )
