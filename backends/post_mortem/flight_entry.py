"""The entries of a Flight Recorder dump, checked: every value has its type then."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..observe.evidence import UNKNOWN_ARRAYS, Arrays, SourceLine, State
from .evidence_file import UnreadableError, only
from .log_lines import function_of
from .source_lines import users_line

__all__ = ["Entry", "Kind", "read_entries", "splits"]

_STATES: dict[object, State] = {
    "scheduled": "scheduled",
    "started": "started",
    "completed": "completed",
}
#: Torch's ops whose sizes differ from rank to rank.
_UNEVEN = frozenset(("all_gather_v", "reduce_scatter_v", "all_to_all_v_single"))
#: The entry that ends a batch: ``coalesced``, ``REDUCE_SCATTER_coalesced``.
_CLOSING = re.compile(r"(?:([A-Z_]+)_)?coalesced")
#: Keys of an entry that are numbers, and what they are if they are left out.
_NUMBERS = {
    "record_id": 0,
    "pg_id": -1,
    "collective_seq_id": 0,
    "p2p_seq_id": 0,
    "timeout_ms": 0,
    "time_created_ns": 0,
}
_TIMES = "time_discovered_started_ns", "time_discovered_completed_ns"
#: Those that repeat.
_KIND = (
    *("profiling_name", "process_group", "is_p2p", "state", "retired"),
    *("input_sizes", "output_sizes", "input_dtypes", "output_dtypes"),
)
#: More digits than a place in a group has.
_LONG = 8


class Kind(NamedTuple):
    """What many entries of a rank have in common."""

    #: The name and the description of the process group.
    group: tuple[str, str]
    #: ``nccl``; empty: the entry does not tell.
    library: str
    #: Torch's name of the op.
    name: str
    is_p2p: bool
    #: The places of the rank itself, and of its peer, in the group, if its name tells.
    place: int | None
    peer: int | None
    #: It ends a batch.
    closes: bool
    state: State
    retired: bool | None
    arrays: Arrays


class Entry(NamedTuple):
    """One entry: an op, or the end of a batch of ops."""

    record_id: int
    pg_id: int
    collective_seq_id: int
    p2p_seq_id: int
    timeout_ms: int
    #: 0: not known.
    created_ns: int
    #: Of torch's op in flight, when it was dumped.
    started_ns: int | None
    ended_ns: int | None
    kind: Kind
    line: SourceLine | None
    #: The entry itself where our own recorder has written it, which tells more: its
    #: values are not checked.
    ours: Mapping[str, Any] | None


def read_entries(found: Sequence[Any]) -> list[Entry]:
    """Check entries, one key of all after the other: those of a job may be a million.

    What repeats from entry to entry is made once. Raises `UnreadableError`.
    """
    for number, one in enumerate(found):
        if type(one) is not dict:
            raise UnreadableError(f"damaged: entry {number} is not a dict")
    numbers = {key: _numbers(found, key, none) for key, none in _NUMBERS.items()}
    # Before version 2.1 of the format, one number counted both kinds.
    numbers["collective_seq_id"] = [
        seq or only(int, one.get("seq_id")) or 0
        for seq, one in zip(numbers["collective_seq_id"], found, strict=True)
    ]
    columns: tuple[Iterable[Any], ...] = (
        *numbers.values(),
        *(_times(_column(found, key)) for key in _TIMES),
        _kinds(found),
        _lines(_column(found, "frames")),
        [one if "backend" in one else None for one in found],
    )
    return [*map(Entry._make, zip(*columns, strict=True))]


def _column(found: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [one.get(key) for one in found]


def _numbers(found: Sequence[dict[str, Any]], key: str, none: int) -> Sequence[int]:
    values = _column(found, key)
    if {*map(type, values)} <= {int}:
        return values
    for number, one in enumerate(values):
        if type(one) is not int and one is not None:
            raise UnreadableError(f"damaged: {key} of entry {number} is no number")
    return [none if one is None else one for one in values]


def _times(values: Iterable[Any]) -> list[int | None]:
    """Return times; 0 stands for none in JSON."""
    return [one if type(one) is int and one > 0 else None for one in values]


def _kinds(found: Sequence[dict[str, Any]]) -> list[Kind]:
    seen: dict[bytes, Kind] = {}
    kinds = []
    take = itemgetter(*_KIND)
    for number, entry in enumerate(found):
        try:
            values = take(entry)
        except KeyError:
            values = tuple(map(entry.get, _KIND))
        # It writes once what several lists refer to: marshal would write each time
        # what a small damaged file may have refer to itself a billion times.
        key = pickle.dumps(values, 4)
        kind = seen.get(key)
        if kind is None:
            kind = seen[key] = _kind(number, *values)
        kinds.append(kind)
    return kinds


def _kind(
    number: int,
    text: Any,
    group: Any,
    is_p2p: Any,
    state: Any,
    retired: Any,
    *arrays: Any,
) -> Kind:
    if (
        type(text) is not str
        or not isinstance(group, (tuple, list))
        or {*map(type, group)} != {str}
    ):
        raise UnreadableError(f"damaged: entry {number} lacks its op or its group")
    library, _, name = text.partition(":")
    if not name:
        library, name = "", library
    closing = _CLOSING.fullmatch(name)
    if closing is not None and closing[1]:
        name = function_of(closing[1])
    name, _, path = name.partition(" ")
    place, _, peer = path.replace("<-", "->").partition("->")
    inputs, outputs, read, written = arrays
    return Kind(
        (group[0], group[1] if len(group) > 1 else ""),
        library,
        name,
        bool(is_p2p) or bool(path) or text.endswith((":send", ":recv")),
        _place(place),
        _place(peer),
        closing is not None,
        _STATES.get(only(str, state), "unknown"),
        only(bool, retired),
        UNKNOWN_ARRAYS
        if name in _UNEVEN
        else Arrays(_sizes(inputs), _sizes(outputs), _dtypes(read), _dtypes(written)),
    )


def _place(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < _LONG else None


def _lines(stacks: Iterable[Any]) -> list[SourceLine | None]:
    # Torch writes each frame once, and refers to it from the stack of each op.
    seen: dict[tuple[int, ...], SourceLine | None] = {}
    found = []
    for frames in stacks:
        key = (*map(id, frames),) if type(frames) is list else ()
        try:
            line = seen[key]
        except KeyError:
            line = seen[key] = users_line(frames)
        found.append(line)
    return found


def _sizes(value: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return the shape of each array."""
    if not isinstance(value, (list, tuple)):
        return None
    for size in value:
        if not isinstance(size, (list, tuple)):
            return None
        if not all(type(extent) is int for extent in size):
            return None
    return tuple(map(tuple, value))


def _dtypes(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, (list, tuple)):
        return None
    return tuple(value) if all(type(one) is str for one in value) else None


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
