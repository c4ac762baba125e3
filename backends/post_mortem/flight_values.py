"""Values of a Flight Recorder entry, checked: None where one is not as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..observe.evidence import State
from .flight_dump import Entry

__all__ = [
    "dtypes",
    "flag",
    "integer",
    "sizes",
    "splits",
    "state_of",
    "text",
    "time_ns",
]


def state_of(entry: Entry) -> State:
    """Return the state of an entry."""
    state = entry.get("state")
    if state == "scheduled":
        return "scheduled"
    if state == "started":
        return "started"
    return "completed" if state == "completed" else "unknown"


def flag(value: Any) -> bool | None:
    """Return a truth value."""
    return value if isinstance(value, bool) else None


def integer(value: Any) -> int | None:
    """Return a number that is no truth value."""
    return value if type(value) is int else None


def text(value: Any) -> str | None:
    """Return a text."""
    return value if type(value) is str else None


def splits(
    value: Any, ranks: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return what an op receives from and sends to each of `ranks`."""
    if ranks is None or not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    for side in value:
        if not isinstance(side, (list, tuple)) or len(side) != len(ranks):
            return None
        if not all(type(one) is int for one in side):
            return None
    return value[0], value[1]


def time_ns(value: Any) -> int | None:
    """Return a time; 0 stands for none in JSON."""
    return value if type(value) is int and value > 0 else None


def sizes(value: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return the shape of each array."""
    if not isinstance(value, (list, tuple)):
        return None
    for size in value:
        if not isinstance(size, (list, tuple)):
            return None
        for extent in size:
            if type(extent) is not int:
                return None
    return tuple(map(tuple, value))


def dtypes(value: Any) -> tuple[str, ...] | None:
    """Return the dtype of each array."""
    if not isinstance(value, (list, tuple)):
        return None
    return tuple(value) if all(type(one) is str for one in value) else None
