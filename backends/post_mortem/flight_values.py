"""Values of a Flight Recorder entry, checked: None where one is not as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..observe.evidence import State
from .flight_dump import Entry

__all__ = ["dtypes", "only", "sizes", "splits", "state_of", "time_ns"]

T = TypeVar("T")

_STATES: dict[object, State] = {
    "scheduled": "scheduled",
    "started": "started",
    "completed": "completed",
}


def state_of(entry: Entry) -> State:
    return _STATES.get(only(str, entry.get("state")), "unknown")


def only(kind: type[T], value: Any) -> T | None:
    """Return a value of this very type: a truth value is no number."""
    return value if type(value) is kind else None


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
        if not all(type(extent) is int for extent in size):
            return None
    return tuple(map(tuple, value))


def dtypes(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, (list, tuple)):
        return None
    return tuple(value) if all(type(one) is str for one in value) else None
