"""Causes as verdicts: one sentence for the cause, single lines for what follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ...groups.key import GroupKey
from ...rank_sets import name_ranks
from ..evidence import Group, IssuedOp
from ..verdicts import Fault, Verdict
from .picture import Cause, Picture
from .scene import Wait

__all__ = ["undecided", "verdict_of"]

#: Lines on what follows from a cause, and waits of a cycle in its sentence.
MOST = 8

#: Runs of ranks that a sentence names one by one.
PIECES = 12

_Place = tuple[Group, int, str]


def verdict_of(
    cause: Cause, picture: Picture, told: Collection[_Place], *, first: bool
) -> Verdict:
    """Return a cause as a verdict; the first one has the consequences."""
    tell = _cycle if cause.cycle else _TEXTS.get(cause.fault, _mismatch)
    text = tell(cause, picture)
    difference = cause.difference
    op: IssuedOp | None
    if difference is not None:
        group, seq = difference.group, difference.seq
        op = difference.op
    else:
        wait = cause.waits[0]
        group, seq = wait.group, wait.seq
        op = wait.op or _example(picture, wait)
    waiting = {wait.rank for wait in picture.waits} - set(cause.culprits)
    return Verdict(
        cause.fault,
        GroupKey(group.name, group.ranks),
        cause.culprits,
        tuple(sorted(waiting)),
        op.op if op is not None else "",
        seq,
        text,
        line=str(op.line) if op is not None and op.line is not None else "",
        consequences=_consequences(picture, told, cause) if first else (),
    )


def undecided(picture: Picture) -> Verdict:
    """Return the verdict that ranks wait and that nothing certain is known of why."""
    wait = min(picture.waits, key=lambda one: (one.rank, one.seq))
    lines = _lines(picture.waits)
    unknown = {rank for one in picture.waits for rank in one.unknown}
    known = {rank for rank, one in picture.evidence.ranks.items() if one.recorded}
    unrecorded = sorted(unknown - known)
    why = (
        f"no records of {name_ranks(unrecorded)} are here"
        if unrecorded
        else "what is known does not tell for whom"
    )
    return Verdict(
        Fault.UNDECIDED,
        GroupKey(wait.group.name, wait.group.ranks),
        (),
        tuple(sorted({one.rank for one in picture.waits})),
        wait.name,
        wait.seq,
        f"{lines[0]}, and nothing certain is known of the cause: {why}",
        line=str(wait.op.line) if wait.op is not None and wait.op.line else "",
        consequences=tuple(lines[1:MOST]),
    )


# -- names -----------------------------------------------------------------------


def _op(wait: Wait, op: IssuedOp | None = None) -> str:
    """Return ``all_reduce #13 of group 'dp' (train.py:31)``."""
    return _named(wait.group, wait.seq, wait.op or op)


def _named(group: Group, seq: int, op: IssuedOp | None) -> str:
    name = f"{op.op} #{seq}" if op is not None else f"op #{seq}"
    line = f" ({op.line})" if op is not None and op.line is not None else ""
    return f"{name} of group {group.name!r}{line}"


def _example(picture: Picture, wait: Wait) -> IssuedOp | None:
    """Return the op of a wait as another rank issued it."""
    for scene in picture.scenes:
        if scene.group == wait.group:
            return scene.named(wait.seq)
    return None


def _have(ranks: Collection[int]) -> str:
    return "has" if len(set(ranks)) == 1 else "have"


def _they_wait(waits: Iterable[Wait], besides: Collection[int] = ()) -> str:
    ranks = {wait.rank for wait in waits} - set(besides)
    if not ranks:
        return ""
    return f"{_some(ranks)} {'wait' if len(ranks) > 1 else 'waits'}"


def _some(ranks: Collection[int]) -> str:
    """Return the ranks, and their number where they are in many pieces."""
    text = name_ranks(ranks)
    pieces = text.split(", ")
    if len(pieces) <= PIECES:
        return text
    begin = ", ".join(pieces[: PIECES // 2]).removeprefix("ranks ")
    return f"{len(set(ranks))} ranks ({begin}, …)"


def _direction(wait: Wait) -> str:
    if not wait.is_p2p or wait.op is None or wait.op.peer is None:
        return ""
    return f" {'to' if wait.op.op == 'send' else 'from'} rank {wait.op.peer}"


# -- sentences -------------------------------------------------------------------


def _mismatch(cause: Cause, picture: Picture) -> str:
    difference = cause.difference
    assert difference is not None
    sides: dict[object, list[int]] = {}
    for rank, value in difference.values.items():
        sides.setdefault(value, []).append(rank)
    told = []
    for value, ranks in sorted(
        sides.items(), key=lambda one: (one[1][0] not in cause.culprits, one[1])
    ):
        op = difference.ops[ranks[0]]
        verb = "is" if len(ranks) == 1 else "are"
        text = f"{_some(ranks)} {verb} in {op.op} #{op.seq}"
        if op.is_p2p:
            text += f" {'to' if op.op == 'send' else 'from'} rank {op.peer}"
        if cause.fault in _NOUNS:
            text += " " + _NOUNS[cause.fault].format(_value(value))
        told.append(f"{text} ({op.line})" if op.line is not None else text)
    text = f"in group {difference.group.name!r} {' while '.join(told)}"
    if cause.fault is Fault.ORDER_MISMATCH:
        text += "; they issue the same ops in different orders"
    return text


_NOUNS = {
    Fault.DTYPE_MISMATCH: "with dtype {}",
    Fault.SIZE_MISMATCH: "with {} elements",
    Fault.ROOT_MISMATCH: "with root {}",
    Fault.REDUCE_OP_MISMATCH: "with reduce op {}",
}


def _value(value: object) -> str:
    """Return ``640`` for ``((640,),)``: an array of an op of a batch."""
    while isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, tuple):
        parts = list(dict.fromkeys(map(_value, value)))
        return ", ".join(parts[:4]) + (", …" if len(parts) > 4 else "")
    return str(value)


def _hang(cause: Cause, picture: Picture) -> str:
    wait = cause.waits[0]
    op = _op(wait, _example(picture, wait))
    who = name_ranks(cause.culprits)
    if wait.ahead:
        ahead = {rank for one in cause.waits for rank in one.ahead}
        each = "" if len(cause.waits) == 1 else " (the first such op of each)"
        what = "its GPU or its" if len(cause.culprits) == 1 else "their GPUs or their"
        return (
            f"{who} {_have(cause.culprits)} issued {op}{_direction(wait)} and not "
            f"completed it{each}, while "
            f"{_some(ahead)} {_have(ahead)}: {what} "
            f"{'process has' if len(cause.culprits) == 1 else 'processes have'} stopped"
        )
    both = "both sides" if wait.is_p2p else "all ranks"
    return (
        f"{both} have entered {op}{_direction(wait)}, nothing differs, and it does not "
        f"complete on {who}"
    )


def _absence(cause: Cause, picture: Picture) -> str:
    wait = cause.waits[0]
    who = name_ranks(cause.culprits)
    entered = f"{_have(cause.culprits)} not entered"
    op = _op(wait, _example(picture, wait))
    if wait.is_p2p:
        other = "recv" if wait.name == "send" else "send"
        entered = f"{_have(cause.culprits)} not issued the {other} for"
        op = f"{op}{_direction(wait) if len(cause.culprits) == 1 else ''}"
    firsts = {one.place for one in cause.waits[: len(cause.culprits)]}
    waits = [one for one in cause.waits if one.place in firsts]
    if cause.unrecorded:
        text = f"{who} left no records, and all others are in {op}"
        if len(cause.culprits) > 1:
            text += "; at least one of them has not entered it"
    else:
        text = f"{who} {entered} {op}"
    waiting = _they_wait(waits, cause.culprits)
    text = f"{text}; {waiting} in it" if waiting and not cause.unrecorded else text
    for rank in cause.culprits[:MOST]:
        facts = _facts(rank, picture, wait)
        if facts:
            text += f"; {facts}"
    return text


def _facts(rank: int, picture: Picture, wait: Wait) -> str:
    """Return what else is known of a rank that others wait for."""
    one = picture.rank(rank)
    if one.death is not None:
        return one.death
    if one.exception is not None:
        place = f" at {one.exception_line}" if one.exception_line else ""
        return f"rank {rank} handles {one.exception}{place}"
    if one.has_left:
        return f"rank {rank} has left the program"
    if one.location is not None:
        called = f" in {one.called}" if one.called else ""
        return f"rank {rank} is at {one.location}{called}"
    return _history(rank, picture, wait)


def _history(rank: int, picture: Picture, wait: Wait) -> str:
    """Return how often a rank issued an op from the line, and what it issued last."""
    one = picture.rank(rank)
    if not one.recorded:
        return ""
    last: IssuedOp | None = None
    group: Group | None = None
    for key, found in one.groups.items():
        if found.ops and (last is None or found.ops[-1].order > last.order):
            last, group = found.ops[-1], key
    if last is None or group is None:
        return ""
    text = f"the last op of rank {rank} is {_named(group, last.seq, last)}"
    own = one.groups.get(wait.group)
    other = picture.rank(wait.rank).groups.get(wait.group)
    line = wait.op.line if wait.op is not None else None
    if line is None or own is None or other is None or wait.is_p2p:
        return text
    if own.lists_all and other.lists_all:
        name = wait.name

        def count(ops: Sequence[IssuedOp]) -> int:
            return sum(op.op == name and op.line == line for op in ops)

        ours, theirs = count(own.ops), count(other.ops)
        if 0 < ours < theirs:
            text += f"; it issued {ours:,} of {theirs:,} {name}s of {line}"
    return text


def _cycle(cause: Cause, picture: Picture) -> str:
    ring = [wait.rank for wait in cause.cycle]
    told = []
    for place, wait in enumerate(cause.cycle[:MOST]):
        awaited = ring[(place + 1) % len(ring)]
        whom = _direction(wait) or f", for rank {awaited}"
        told.append(f"rank {wait.rank} in {_op(wait)}{whom}")
    more = ", …" if len(ring) > MOST else ""
    names = {wait.name for wait in cause.cycle}
    advice = "issue the ops in one order on all ranks"
    if names == {"recv"}:
        advice = "all receive first: one of them must send first"
    elif names == {"send"}:
        advice = "all send first: one of them must receive first"
    elif names <= {"send", "recv"}:
        advice = "each send needs its receive in the same place of the order"
    return f"{name_ranks(ring)} wait for each other: {', '.join(told)}{more}; {advice}"


_TEXTS: dict[Fault, Callable[[Cause, Picture], str]] = {
    Fault.EXECUTION_HANG: _hang,
    Fault.MISSING_RANKS: _absence,
    Fault.RANK_DEAD: _absence,
    Fault.RANK_BUSY_ELSEWHERE: _absence,
    Fault.RANK_NOT_RESPONDING: _absence,
}


# -- consequences ----------------------------------------------------------------


def _consequences(
    picture: Picture, told: Collection[_Place], cause: Cause
) -> tuple[str, ...]:
    mentioned = {id(wait) for wait in cause.cycle}
    waits = [
        wait
        for wait in picture.waits
        if wait.place not in told
        and id(wait) not in mentioned
        and not (cause.difference is not None and wait in cause.waits)
    ]
    lines = _lines(waits)
    if len(lines) > MOST:
        lines = [*lines[: MOST - 1], f"and {len(lines) - MOST + 1} more ops wait"]
    return tuple(lines)


def _lines(waits: Iterable[Wait]) -> list[str]:
    """Return one line for each op that ranks wait in, the most ranks first.

    The groups of one name that wait in one op share a line.
    """
    places: dict[tuple[str, str, int, str], list[Wait]] = {}
    for wait in waits:
        direction = _direction(wait)
        key = wait.group.name, wait.name, wait.seq, direction
        places.setdefault(key, []).append(wait)
    ordered = sorted(places.items(), key=lambda one: (-len(one[1]), one[0]))
    lines = []
    for _, found in ordered:
        wait = found[0]
        groups = len({one.group for one in found})
        awaited = {
            rank for one in found for rank in one.absent or (one.unknown or ())
        } - {one.rank for one in found}
        text = f"{_they_wait(found)} in {_op(wait)}{_direction(wait)}"
        if groups > 1:
            text += f", {groups} groups of this name,"
        if awaited and not _direction(wait):
            text += f" for {_some(awaited)}"
        lines.append(text.rstrip(","))
    return lines
