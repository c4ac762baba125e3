"""Mismatches: what ranks issued differently under one number, and the text on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        ``4 elements on ranks 0–1, 5 on rank 2 at cell 7 line 3 `all_reduce` #14``; if
        the lines or the ops differ, too: ``rank 2 is at … while ranks 0–1 are at …``.
    """
    ops = [entries[ranks[0]] for ranks in sides]
    place = where(entries[rank] for ranks in sides for rank in ranks)
    values = [_value(fault, op, group) for op in ops]
    noun = _NOUNS.get(fault)
    if noun and " or " not in place:
        values[0] = noun.format(values[0])
        pairs = zip(values, sides, strict=True)
        text = ", ".join(f"{value} on {_name(ranks)}" for value, ranks in pairs)
        return f"{text} at {place}"
    texts = []
    for ranks, value in zip(sides, values, strict=True):
        verb = "is" if len(ranks) == 1 else "are"
        text = f"{name_ranks(ranks)} {verb} at {where(entries[r] for r in ranks)}"
        texts.append(f"{text} with {noun.format(value)}" if noun else text)
    return " while ".join([texts[0], ", ".join(texts[1:])])


#: How messages name a value, if the name and the line of the op do not show it.
_NOUNS = {
    Fault.ROOT_MISMATCH: "root {}",
    Fault.REDUCE_OP_MISMATCH: "reduce op {}",
    Fault.DTYPE_MISMATCH: "dtype {}",
    Fault.SIZE_MISMATCH: "{} elements",
}


def _value(fault: Fault, op: Entry, group: Sequence[int]) -> str:
    value: Any = TRAITS[fault](op) if fault in TRAITS else ""
    if fault is Fault.ROOT_MISMATCH:
        return "none" if value is None else str(group[value])
    return str(value)


def _name(ranks: Sequence[int]) -> str:
    """Return ``ranks 0 and 2–3``: a comma separates values."""
    return " and ".join(name_ranks(ranks).rsplit(", ", 1))
