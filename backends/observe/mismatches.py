"""Mismatches: what ranks issued differently under one number, and the text on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..rank_sets import name_ranks
from ..work.op_type import spec_of
from .records import Record as Entry
from .records import where
from .verdicts import Fault

__all__ = ["TRAITS", "describe_mismatch"]


def _dtype(entry: Entry) -> str:
    return entry["dtypes"][0] if entry["dtypes"] else ""


def _count(entry: Entry) -> int | None:
    place = spec_of(entry["op"]).same_size
    if place is None or not entry["sizes"]:
        return None
    count = 1
    for extent in entry["sizes"][place]:
        count *= extent
    return count


#: What all ranks have to issue alike, the first difference first.
TRAITS: dict[Fault, Callable[[Entry], Any]] = {
    Fault.OP_MISMATCH: lambda entry: entry["op"],
    Fault.ROOT_MISMATCH: lambda entry: entry["peer"],
    Fault.REDUCE_OP_MISMATCH: lambda entry: entry.get("reduce_op"),
    Fault.DTYPE_MISMATCH: _dtype,
    Fault.SIZE_MISMATCH: _count,
}


def describe_mismatch(
    fault: Fault,
    sides: Sequence[Sequence[int]],
    entries: Mapping[int, Entry],
    group: Sequence[int],
) -> str:
    """Return a text on ranks that issued different ops.

    Parameters
    ----------
    fault
        What differs.
    sides
        The ranks that issued the same, one sequence for each value.
    entries
        The op of each rank.
    group
        The global ranks of the group, in the order of their ranks in it.

    Returns
    -------
    str
        ``4 / 5 elements on ranks 0–1 / rank 2 at cell 7 line 3 `all_reduce` #14``;
        where the lines or the ops differ, too: ``rank 2 is at … while ranks 0–1 are
        at …``.
    """
    ops = [entries[ranks[0]] for ranks in sides]
    place = where(entries[rank] for ranks in sides for rank in ranks)
    trait = _trait(fault, ops, group)
    if trait and " or " not in place:
        return f"{trait} on {_name_sides(sides)} at {place}"
    texts = []
    for ranks, op in zip(sides, ops, strict=True):
        verb = "is" if len(ranks) == 1 else "are"
        text = f"{name_ranks(ranks)} {verb} at {where(entries[r] for r in ranks)}"
        trait = _trait(fault, [op], group)
        texts.append(f"{text} with {trait}" if trait else text)
    return " while ".join([texts[0], ", ".join(texts[1:])])


def _trait(fault: Fault, ops: Iterable[Entry], group: Sequence[int]) -> str:
    """Return what differs in `ops`, if their names and lines do not show it."""
    if fault is Fault.ROOT_MISMATCH:
        roots = (op["peer"] for op in ops)
        return f"root {_listed('none' if r is None else group[r] for r in roots)}"
    if fault is Fault.REDUCE_OP_MISMATCH:
        return f"reduce op {_listed(op['reduce_op'] for op in ops)}"
    if fault is Fault.DTYPE_MISMATCH:
        return f"dtype {_listed(map(_dtype, ops))}"
    if fault is Fault.SIZE_MISMATCH:
        return f"{_listed(map(_count, ops))} elements"
    return ""


def _listed(values: Iterable[object]) -> str:
    return " / ".join(map(str, values))


def _name_sides(sides: Sequence[Sequence[int]]) -> str:
    """Return ``ranks 0 / 1 / 2``, or ``rank 2 / ranks 0–1``."""
    if all(len(ranks) == 1 for ranks in sides):
        return f"ranks {_listed(rank for (rank,) in sides)}"
    return _listed(map(name_ranks, sides))
