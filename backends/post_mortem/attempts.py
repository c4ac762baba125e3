"""Which rank each dump is of, and which of several dumps of one rank counts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from ..rank_sets import group_by
from .flight_rank import RankDump

__all__ = ["assign_ranks", "newest_attempt"]

_OLDER = (
    "not used: it is of an older attempt, and rank {} left nothing in the newest one"
)
_UNSORTED = (
    "not used: the rank has another dump, and nothing tells which of them is newer"
)
#: Nanoseconds between the dumps of two attempts; copies of files are made at once.
_NOT_AT_ONCE = 10 * 10**9
#: Nanoseconds between the last op of one attempt, which timed out, and the first one of
#: the next; the clocks of hosts differ by less.
_APART = 300 * 10**9


def assign_ranks(dumps: Iterable[RankDump]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the rank of each dump by its path, and problems by path.

    The content decides where it can: the groups that a rank is in, and its own place
    in sends and receives. Then the name of the file counts.
    """
    ranks: dict[str, int] = {}
    problems: dict[str, str] = {}
    for one in dumps:
        path = one.dump.path
        named = one.dump.named
        if one.candidates is None:
            if named:
                ranks[path] = named[0]
            else:
                problems[path] = "not used: neither its content nor its name has a rank"
            continue
        fitting = [rank for rank in named if rank in one.candidates]
        if len(one.candidates) == 1:
            ranks[path] = next(iter(one.candidates))
            if named and not fitting:
                problems[path] = (
                    f"its content is that of rank {ranks[path]}, although its name "
                    f"says {named[0]}"
                )
        elif fitting:
            ranks[path] = fitting[0]
        elif named:
            problems[path] = (
                f"not used: its name says rank {named[0]}, which is in none of its "
                "process groups"
            )
        else:
            problems[path] = (
                "not used: its name has no rank, and its content fits several"
            )
    return ranks, problems


def newest_attempt(
    dumps: Sequence[RankDump], ranks: dict[str, int]
) -> tuple[list[RankDump], dict[str, str]]:
    """Return one dump for each rank, all of the newest attempt, and problems by path.

    Where a rank has several dumps, the job was started anew, or dumped twice. A dump
    of an older attempt must not stand for a rank that left none in the newest one.
    """
    by_rank = group_by(dumps, lambda one: ranks[one.dump.path])
    problems: dict[str, str] = {}
    for rank in _sort_by_age(by_rank):
        several = by_rank.pop(rank)
        problems |= dict.fromkeys((one.dump.path for one in several), _UNSORTED)
    doubles = [several for several in by_rank.values() if len(several) > 1]
    if not doubles:
        alone = [several[0] for several in by_rank.values()]
        left = _left_behind(alone)
        for one in left:
            problems[one.dump.path] = _OLDER.format(ranks[one.dump.path])
        return [one for one in alone if one not in left], problems
    older = {one.dump.path for several in doubles for one in several[:-1]}
    # The newest attempt began when the first of its dumps begins; what was over by then
    # is older. Dumps of one attempt overlap.
    apart = [
        several for several in doubles if several[-2].newest_ns < several[-1].oldest_ns
    ]
    folders = {os.path.dirname(path) for path in older} - {
        _folder(several[-1]) for several in doubles
    }
    if not any(several[-1].newest_ns for several in doubles):
        # No rank of the newest attempt was in an op: its folder alone tells it apart.
        older |= {one.dump.path for one in dumps if _folder(one) in folders}
    if apart:
        begins = min(several[-1].oldest_ns for several in apart)
        older |= {
            one.dump.path
            for several in by_rank.values()
            for one in several
            if one.newest_ns < begins and (one.newest_ns or _folder(one) in folders)
        }
    used = []
    for rank, several in by_rank.items():
        newest = several[-1]
        for one in several[:-1]:
            problems[one.dump.path] = (
                f"not used: {os.path.basename(newest.dump.path)!r} is newer for rank "
                f"{rank}"
            )
        if newest.dump.path in older:
            problems[newest.dump.path] = _OLDER.format(rank)
        else:
            used.append(newest)
    return used, problems


def _left_behind(dumps: Sequence[RankDump]) -> list[RankDump]:
    """Return the dumps that ended long before all others began.

    A rank that leaves none in a new attempt does not overwrite the one of the old.
    """
    begun = sorted(one.oldest_ns for one in dumps if one.whole and one.oldest_ns)
    if 2 * len(begun) <= len(dumps):
        return []
    begins = begun[len(begun) // 2] - _APART
    left = [one for one in dumps if 0 < one.newest_ns < begins]
    return left if 2 * len(left) < len(dumps) else []


def _sort_by_age(by_rank: Mapping[int, list[RankDump]]) -> list[int]:
    """Sort the dumps of each rank; return the ranks of which nothing tells the order.

    A dump without an op has the age of its folder, as other ranks tell it, or of its
    file.
    """
    older, newer = set(), set()
    for several in by_rank.values():
        several.sort(key=_age)
        folders = [_folder(one) for one in several]
        if several[0].newest_ns and len(several) > 1:
            older.update(folders[:-1])
            newer.add(folders[-1])
    newer -= older
    unsorted = []
    for rank, several in by_rank.items():
        if several[0].newest_ns or not several[-1].newest_ns:
            continue
        if newer:
            several.sort(key=lambda one: _folder(one) in newer)
            continue
        times = [
            one.read_ns if one.newest_ns else one.dump.modified_ns for one in several
        ]
        known = sorted(one for one in times if one is not None)
        apart = (two - one > _NOT_AT_ONCE for one, two in pairwise(known))
        if len(known) == len(times) and all(apart):
            several[:] = [several[times.index(one)] for one in known]
        else:
            unsorted.append(rank)
    return unsorted


def _folder(one: RankDump) -> str:
    return os.path.dirname(one.dump.path)


def _age(one: RankDump) -> tuple[int, int, str]:
    return one.newest_ns, one.dump.modified_ns or 0, one.dump.path
