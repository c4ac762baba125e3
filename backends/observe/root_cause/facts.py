"""What is known of the ranks that others wait for: where they are instead, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ...rank_sets import group_by, in_plural, name_ranks, tell_ranks
from ..evidence import Evidence, Group, IssuedOp, RankEvidence
from .names import Names
from .picture import Picture
from .scene import Wait

__all__ = ["deaths", "exceptions", "places", "silences", "whereabouts"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
#: Ranks or sets of ranks of which each has a clause.
MOST = 4


def whereabouts(
    culprits: Collection[int], picture: Picture, names: Names, wait: Wait
) -> str:
    """Return where ranks are instead of in the op of `wait`, ``""`` if not known.

    ``it is at data.py:77``; ``rank 1 is at data.py:77; rank 2 left cell 7 at its end``.
    """
    facts = group_by(sorted(culprits), lambda rank: _fact(picture.rank(rank), names))
    histories = group_by(
        facts.pop("", ()), lambda rank: _history(rank, picture, names, wait)
    )
    known = {fact: ranks for fact, ranks in (facts | histories).items() if fact}
    if len(known) == 1:
        ((fact, ranks),) = known.items()
        if len(ranks) == len(set(culprits)):
            return f"they {in_plural(fact)}" if len(ranks) > 1 else f"it {fact}"
    clauses = [tell_ranks(ranks, fact) for fact, ranks in known.items()]
    if len(clauses) > MOST:
        clauses[MOST - 1 :] = ["…"]
    return "; ".join(clauses)


def places(
    culprits: Collection[int], picture: Picture, names: Names, wait: Wait
) -> dict[str, list[int]]:
    """Return in a few words where ranks are → those that are there."""

    def place(rank: int) -> str:
        one = picture.rank(rank)
        if one.death is not None:
            return "dead"
        if one.silence is not None:
            return "no answer"
        fact = _fact(one, names) or _history(rank, picture, names, wait)
        return fact.removeprefix("is ")

    return group_by(sorted(culprits), place)


def deaths(culprits: Collection[int], evidence: Evidence) -> str:
    """Return how ranks died, those that died alike together."""

    def death(rank: int) -> str:
        how = str(evidence.rank(rank).death).removeprefix(f"rank {rank} ")
        return _without_addresses(how)

    died = group_by(sorted(culprits), death)
    told = [tell_ranks(ranks, how) for how, ranks in died.items()]
    if len(told) > MOST:
        told = [f"{name_ranks(culprits)} are dead", *told[: MOST - 1], "…"]
    return "; ".join(told)


def exceptions(culprits: Collection[int], evidence: Evidence, told: str) -> list[str]:
    """Return the exceptions that ranks handle and that `told` does not have."""
    known = _without_addresses(told)
    return [
        f"rank {rank} {_handles(one)}"
        for rank, one in evidence.ranks.items()
        if rank in culprits
        and one.exception
        and _without_addresses(one.exception) not in known
    ]


def _without_addresses(text: str) -> str:
    """Leave out where objects in the text of an exception are: ranks differ in it."""
    return _ADDRESS.sub(">", text)


def silences(culprits: Collection[int], evidence: Evidence) -> str:
    """Return for how long ranks have not answered, and why."""

    def silence(rank: int) -> tuple[str, str]:
        one = evidence.rank(rank)
        return str(one.silence), one.process or ""

    # Ranks whose processes are not known share a clause.
    return "; ".join(
        f"{name_ranks(ranks)}{f' ({process})' if process else ''} "
        f"{in_plural(how) if len(ranks) > 1 else how}"
        for (how, process), ranks in group_by(sorted(culprits), silence).items()
    )


def _fact(one: RankEvidence, names: Names) -> str:
    """Return what a rank does, without its name: ``is at data.py:77``."""
    if one.exception is not None:
        return _handles(one)
    if one.departure is not None:
        return one.departure
    if one.groups_ended_at and str(one.location or "") in ("", one.groups_ended_at):
        return f"has called destroy_process_group() at {one.groups_ended_at}"
    if one.ended_with is not None:
        return f"ended with {one.ended_with}"
    if one.location is not None:
        called = f" in {one.called}" if one.called else ""
        after = one.after_groups and f",{one.after_groups}"
        place = f"is at {names.place(one.location)}"
        thread = one.thread_exception
        thread = f", and a thread of it has ended with {thread}" if thread else ""
        return f"{place}{_in_flight(one, names) or called}{after}{thread}"
    return one.last_cell_exit or ""


def _handles(one: RankEvidence) -> str:
    place = f" at {one.exception_line}" if one.exception_line else ""
    return f"handles {one.exception}{place}"


def _in_flight(one: RankEvidence, names: Names) -> str:
    """Return the first op that a rank has in flight, which is too young to hang."""
    begun = [
        (op.order, group, op)
        for group, found in one.groups.items()
        for op in found.ops
        if op.in_flight
    ]
    if not begun:
        return ""
    _, group, op = min(begun, key=lambda found: found[0])
    # By their text: a stack may have another path, and other callers.
    if str(op.line) == str(one.location):
        return f" in {op}{names.of_group(group)}"
    return f", with {op}{names.of_group(group)} in flight"


def _history(rank: int, picture: Picture, names: Names, wait: Wait) -> str:
    """Return how often a rank issued an op from the line, and what it issued last."""
    one = picture.rank(rank)
    latest = _last_op(one)
    if not one.recorded or latest is None:
        return ""
    group, last = latest
    missed = _missed(one, picture, wait)
    return f"issued {f'{missed}, and ' if missed else ''}{names.op(last, group)} last"


def _last_op(one: RankEvidence) -> tuple[Group, IssuedOp] | None:
    latest = (
        (group, found.ops[-1]) for group, found in one.groups.items() if found.ops
    )
    return max(latest, key=lambda pair: pair[1].order, default=None)


def _missed(one: RankEvidence, picture: Picture, wait: Wait) -> str:
    own = one.groups.get(wait.group)
    other = picture.rank(wait.rank).groups.get(wait.group)
    line = wait.op.line if wait.op is not None else None
    if line is None or own is None or other is None or wait.is_p2p:
        return ""
    if not (own.lists_all and other.lists_all):
        return ""
    name = wait.name

    def count(ops: Iterable[IssuedOp]) -> int:
        return sum(op.op == name and str(op.line) == str(line) for op in ops)

    ours, theirs = count(own.ops), count(other.ops)
    return f"{ours:,} of {theirs:,} {name}s of {line}" if 0 < ours < theirs else ""
