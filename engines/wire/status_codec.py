"""Encode and parse a rank's summary.

The summary arrives from another process and may contain anything. Every field is
checked here, once, so that code that shows a status need not check again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from ..status import GroupStatus, OpStatus

__all__ = ["Parsed", "number_of", "pack", "parse_summary", "unpack"]

#: Above every real count, and exact in every JSON reader.
_MOST = 2**53
# Made once: there are thousands of checks per second.
_LISTS = (list, tuple)

# The lists of ranks that are kept parsed: every rank of a group is connected to others
# than the next rank.
_MOST_LISTS = 512

#: Ranks of a group at most: no memory is allocated for a claim of more.
_MOST_RANKS = 1 << 20


def pack(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's summary for the wire: the ranks of groups as runs.

    Otherwise each of 256 ranks would send 256 numbers, ten times a second.
    """
    return {**summary, "groups": [_packed(one) for one in summary["groups"]]}


def _packed(group: Mapping[str, Any]) -> dict[str, Any]:
    packed = {**group, "ranks": _runs(group["ranks"])}
    if "transports" in group:
        packed["transports"] = {
            names: _runs(ranks) for names, ranks in group["transports"].items()
        }
    return packed


def unpack(summary: dict[str, Any]) -> dict[str, Any]:
    """Undo `pack`, in place; fields that `pack` did not make stay as they are."""
    groups = summary.get("groups")
    for one in groups if isinstance(groups, _LISTS) else ():
        if not isinstance(one, dict):
            continue
        if isinstance(one.get("ranks"), str):
            one["ranks"] = list(_listed(one["ranks"]))
        transports = one.get("transports")
        if isinstance(transports, dict):
            for names, ranks in transports.items():
                if isinstance(ranks, str):
                    transports[names] = list(_listed(ranks))
    return summary


def _runs(ranks: Sequence[int]) -> str:
    """``"0-3,7"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@lru_cache(maxsize=_MOST_LISTS)
def _listed(runs: str) -> tuple[Any, ...]:
    ranks: list[int] = []
    for run in runs.split(","):
        first, dash, last = run.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or len(first + last) > 18:
            return (runs,)
        if int(last) - int(first) + len(ranks) > _MOST_RANKS:
            return (runs,)
        ranks.extend(range(int(first), int(last) + 1))
    return tuple(ranks)


def number_of(summary: Mapping[str, Any]) -> int:
    """Return the number of a summary among those of its process; 0 if it has none.

    What the summary with a higher number leaves out happened later.
    """
    number = summary.get("number")
    return number if isinstance(number, int) else 0


class Parsed(NamedTuple):
    """What a rank's summary says, as in `RankStatus`."""

    groups: tuple[GroupStatus, ...] = ()
    cell: int | None = None
    busy_for: float | None = None
    line: str = ""
    line_for: float | None = None
    gpu: str = ""
    memory: int | None = None
    gpu_memory: int | None = None
    advice: tuple[str, ...] = ()


def parse_summary(summary: Mapping[str, Any]) -> Parsed:
    """Return what a rank's summary says.

    Raises `ValueError` or `KeyError` naming the field that is not what it
    should be.
    """
    return Parsed(
        groups=tuple(_group(one) for one in _list("groups", summary.get("groups", []))),
        cell=_integer("cell", summary.get("cell")),
        busy_for=_number("busy_for", summary.get("busy_for")),
        line=_text("line", summary.get("line", "")),
        line_for=_number("line_for", summary.get("line_for")),
        gpu=_text("gpu", summary.get("gpu", "")),
        memory=_integer("memory", summary.get("memory")),
        gpu_memory=_integer("gpu_memory", summary.get("gpu_memory")),
        advice=tuple(
            _text("advice", one) for one in _list("advice", summary.get("advice", ()))
        ),
    )


def _group(one: Any) -> GroupStatus:
    if not isinstance(one, Mapping):
        _refuse("group", one)
    timeout = _timeout(one["timeout"])
    return GroupStatus(
        name=_text("name", one["name"]),
        ranks=_ranks(one["ranks"]),
        backend=_text("backend", one["backend"]),
        generation=_count("generation", one["generation"]),
        state=_text("state", one["state"]),
        reason=None if one["reason"] is None else _text("reason", one["reason"]),
        timeout=math.inf if timeout is None else timeout,
        devices=_devices(one["devices"]),
        enqueued=_op("enqueued", one.get("enqueued")),
        started=_op("started", one.get("started")),
        completed=_op("completed", one.get("completed")),
        in_flight=_count("in_flight", one["in_flight"]),
        oldest=_op("oldest", one.get("oldest")),
        issued=_integer("issued", one.get("issued")),
        library=_text("library", one.get("library", "")),
        transports=_transports(one.get("transports", {})),
        rpc=one.get("rpc") is True,
    )


def _ranks(value: Any) -> tuple[int, ...]:
    given = tuple(_list("ranks", value))
    try:
        return _checked(given)
    except TypeError:
        # Not even hashable: no number.
        _refuse("ranks", value)


@lru_cache(maxsize=_MOST_LISTS)
def _checked(ranks: tuple[Any, ...]) -> tuple[int, ...]:
    """Return checked ranks; cached, since every message of every rank has the same.

    A value that compares equal to an integer (``1.0``, ``True``) may pass through the
    cache as that integer.
    """
    return tuple(_count("ranks", rank) for rank in ranks)


def _op(field: str, one: Any) -> OpStatus | None:
    if one is None:
        return None
    if not isinstance(one, Mapping):
        _refuse(field, one)
    return OpStatus(
        op=_text("op", one["op"]),
        seq=_integer("seq", one.get("seq")),
        state=_text("state", one.get("state", "")),
        elapsed=_number("elapsed", one.get("elapsed")),
        timeout=_timeout(one.get("timeout")),
        sizes=tuple(
            tuple(_count("sizes", extent) for extent in _list("sizes", size))
            for size in _list("sizes", one.get("sizes", []))
        ),
        dtypes=tuple(
            _text("dtypes", dtype) for dtype in _list("dtypes", one.get("dtypes", []))
        ),
        nbytes=_integer("bytes", one.get("bytes")),
        duration=_number("duration", one.get("duration")),
        peer=_integer("peer", one.get("peer")),
        source=_text("source", one.get("source", "")),
    )


def _devices(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        _refuse("devices", value)
    return {_text("devices", k): _text("devices", v) for k, v in value.items()}


def _transports(value: Any) -> dict[int, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        _refuse("transports", value)
    # A copy: what is cached must not change.
    return _by_rank(
        tuple((_text("transports", names), _ranks(value[names])) for names in value)
    ).copy()


@lru_cache(maxsize=_MOST_LISTS)
def _by_rank(
    items: tuple[tuple[str, tuple[int, ...]], ...],
) -> dict[int, tuple[str, ...]]:
    return {rank: tuple(names.split(",")) for names, ranks in items for rank in ranks}


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        _refuse(field, value)
    return value


def _list(field: str, value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, _LISTS):
        _refuse(field, value)
    return value


def _integer(field: str, value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not -_MOST < value < _MOST:
        _refuse(field, value)
    return value


def _count(field: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        _refuse(field, value)
    return value


def _number(field: str, value: Any) -> float | None:
    if value is None:
        return None
    # NaN is in no range.
    if type(value) not in (int, float) or not -_MOST < value < _MOST:
        _refuse(field, value)
    return value


def _timeout(value: Any) -> float | None:
    """Seconds; infinity where there is no timeout."""
    endless = type(value) is float and value == math.inf
    return value if endless else _number("timeout", value)


def _refuse(field: str, value: Any) -> NoReturn:
    shown = repr(value)
    if len(shown) > 60:
        shown = f"{shown[:60]}…"
    raise ValueError(f"{field} is {shown}")
