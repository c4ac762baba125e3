"""Rank sets as text: every message, table and command names ranks this way."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

__all__ = [
    "brief_members",
    "describe_members",
    "format_ranks",
    "group_by",
    "in_plural",
    "name_ranks",
    "parse_runs",
    "read_members",
    "tell_ranks",
    "write_members",
]

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)

_RUN = re.compile(r"([0-9]+)(?:-([0-9]+))?")
#: More than any job has.
MOST_RANKS = 1 << 20
#: The verbs with which a fact about one rank begins, and those about several.
_PLURALS = {
    "handles": "handle",
    "has": "have",
    "is": "are",
    "runs": "run",
    "waits": "wait",
    "was": "were",
}


def format_ranks(ranks: Iterable[int], dash: str = "-") -> str:
    """Return `ranks` in the syntax of ``-r``: ``{0, 2, 3}`` is ``"0,2-3"``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(
        str(first) if first == last else f"{first}{dash}{last}" for first, last in runs
    )


def parse_runs(text: str, what: str, besides: str = "") -> list[range]:
    """Return the runs that `text` names, in its order.

    The runs are ranges, so that 0-999999999 takes no memory. `what` is the word for
    a number, such as ``"rank"``; `besides` is appended to the error message and names
    the other permitted texts. Raises `ValueError` naming the offending part.
    """
    runs = []
    for raw in text.split(","):
        part = raw.strip()
        match = _RUN.fullmatch(part)
        if match is None:
            wrong = repr(part) if part else "an empty part"
            raise ValueError(
                f"{wrong} is not a {what}; write {what}s like 0 or 0,2-3{besides}"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the run {part} is empty; write {last}-{first}")
        runs.append(range(first, last + 1))
    return runs


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `ranks` as prose: ``"rank 2"``, ``"ranks 0–3"``, ``"ranks 0, 2–3"``."""
    members = set(ranks)
    if not members:
        return "no rank"
    text = format_ranks(members, dash="–").replace(",", ", ")
    return f"rank {text}" if len(members) == 1 else f"ranks {text}"


def in_plural(fact: str) -> str:
    """Return what is said of one rank, ``"is dead"``, as it is said of several."""
    verb, space, rest = fact.partition(" ")
    return f"{_PLURALS.get(verb, verb)}{space}{rest}"


def tell_ranks(ranks: Iterable[int], fact: str) -> str:
    """Return a fact about one rank as one about `ranks`: ``"ranks 0–3 are dead"``."""
    members = set(ranks)
    return f"{name_ranks(members)} {in_plural(fact) if len(members) > 1 else fact}"


def group_by(
    items: Iterable[_Item], key: Callable[[_Item], _Key]
) -> dict[_Key, list[_Item]]:
    """Return the items, ranks for example, by what `key` says of them."""
    found: dict[_Key, list[_Item]] = {}
    for one in items:
        found.setdefault(key(one), []).append(one)
    return found


def describe_members(ranks: Sequence[int]) -> str:
    """Return the name of a group that has none: its ranks, in its own order."""
    return f"ranks {write_members(tuple(ranks))}"


@lru_cache(1024)
def write_members(ranks: tuple[int, ...]) -> str:
    """Return the ranks of a group, in its own order, for `read_members`."""
    ordered = list(ranks) == sorted(ranks)
    return format_ranks(ranks) if ordered else ",".join(map(str, ranks))


@lru_cache(1024)
def read_members(text: str) -> tuple[int, ...]:
    """Return the ranks that `write_members` has written."""
    found: list[int] = []
    try:
        for run in parse_runs(text, "rank") if text else ():
            # The bounds first: 0-999999999 must not be enumerated.
            if run.stop > MOST_RANKS - len(found):
                raise ValueError(f"there are at most {MOST_RANKS} ranks")
            found += run
    except ValueError as error:
        raise ValueError(f"ranks of a group: {text[:40]!r}") from error
    return tuple(found)


def brief_members(ranks: Sequence[int]) -> str:
    """Return the ranks of a group in a few letters: ``0–7``, ``0,8…56``."""
    steps = {after - rank for rank, after in pairwise(ranks)}
    if len(ranks) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]},{ranks[1]}…{ranks[-1]}"
    return format_ranks(ranks, "–")
