"""Causes as verdicts: one sentence for the cause, single lines for what follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from ...groups.key import GroupKey
from ...rank_sets import group_by, name_ranks
from ..evidence import Group, IssuedOp
from ..verdicts import Absence, Fault, Verdict, Waiting
from .differences import Difference, parting
from .facts import deaths, places, silences, whereabouts
from .names import Names, direction, have, listed, some, they_wait
from .order import waits_of_few
from .picture import Cause, Picture
from .scene import Wait
from .splits import tell

__all__ = ["undecided", "verdict_of", "verdict_on_difference"]

#: Lines on what follows from a cause, and waits of a cycle in its sentence.
MOST = 8


def verdict_of(cause: Cause, picture: Picture, others: Sequence[Cause]) -> Verdict:
    """Return a cause as a verdict; the first one has the consequences of all."""
    names = Names(picture)
    text = _TEXTS[cause.fault](cause, picture, names)
    difference = cause.difference
    op: IssuedOp | None
    if difference is not None:
        group, seq, op = difference.group, difference.seq, difference.op
    else:
        wait = cause.waits[0]
        group, seq, op = wait.group, wait.seq, names.example(wait)
    waiting = {wait.rank for wait in picture.waits} - set(cause.culprits)
    return Verdict(
        cause.fault,
        GroupKey(group.name, group.ranks),
        cause.culprits,
        tuple(sorted(waiting)),
        op.op if op is not None else "",
        op.number if op is not None else seq,
        text,
        line=_line(op),
        consequences=_consequences(picture, names, others)
        if cause is others[0]
        else (),
        groups=_groups(wait.group for wait in picture.waits),
        cycle=tuple(
            Waiting(
                _ranks(waits),
                names.edge(waits[0]),
                names.label(waits[0].group),
                awaited,
            )
            for waits, awaited in _steps(cause)
        ),
        waits=_waiting(cause, picture, names),
        absent=_absent(cause, picture, names),
    )


def verdict_on_difference(difference: Difference, picture: Picture) -> Verdict:
    """Return what ranks issued differently as a verdict; nobody waits."""
    cause = Cause(difference.fault, difference.culprits, (), difference)
    op, group = difference.op, difference.group
    return Verdict(
        difference.fault,
        GroupKey(group.name, group.ranks),
        difference.culprits,
        (),
        op.op,
        op.number,
        _mismatch(cause, picture, Names(picture)),
        line=_line(op),
    )


def undecided(waits: Sequence[Wait], picture: Picture) -> Verdict:
    """Return the verdict that ranks wait and that nothing certain is known of why."""
    names = Names(picture)
    wait = min(waits, key=lambda one: (one.rank, one.seq))
    lines = _lines(waits, names)
    unknown = {rank for one in waits for rank in one.unknown}
    known = {rank for rank, one in picture.evidence.ranks.items() if one.recorded}
    unrecorded = sorted(unknown - known)
    why = "what is known does not tell for whom"
    if unrecorded:
        why = f"nothing is known of {name_ranks(unrecorded)}"
    elif wait.lacks_peer:
        why = "a log does not say which rank is on the other side"
    elif wait in picture.doubtful:
        why = "these dumps list a batch of one op alike when it is over"
    elif ahead := waits_of_few(picture).keys():
        why = (
            f"either {some(ahead)} issued an op too many, or the others are late in "
            "what is not recorded"
        )
    elif wait.any_of:
        why = "each other rank of the group may be the one that should send"
    op = names.example(wait)
    return Verdict(
        Fault.UNDECIDED,
        GroupKey(wait.group.name, wait.group.ranks),
        (),
        tuple(sorted({one.rank for one in waits})),
        wait.name,
        op.number if op is not None else wait.seq,
        f"{lines[0]}, and nothing certain is known of the cause: {why}",
        line=_line(op),
        consequences=tuple(lines[1:MOST]),
        groups=_groups(one.group for one in waits),
    )


def _steps(cause: Cause) -> Iterable[tuple[Sequence[Wait], tuple[int, ...]]]:
    """Return who are in each op of a cycle, and those of the next that they await."""
    cycle = cause.cycle
    for waits, following in zip(cycle, (*cycle[1:], *cycle[:1]), strict=True):
        first = waits[0]
        others = set(first.group.ranks).difference(first.ahead)
        found = following[:1] if first.is_p2p else following
        yield waits, _ranks(one for one in found if one.rank in others)


def _ranks(waits: Iterable[Wait]) -> tuple[int, ...]:
    return tuple(sorted({one.rank for one in waits}))


def _waiting(cause: Cause, picture: Picture, names: Names) -> tuple[Waiting, ...]:
    """Return who waits for the culprits, where those are absent."""
    if _TEXTS[cause.fault] is not _absence:
        return ()
    found: dict[tuple[str, str, tuple[int, ...]], set[int]] = {}
    for wait in picture.waits:
        awaited = wait.awaited.intersection(cause.culprits)
        if wait.rank in cause.culprits or not awaited:
            continue
        key = names.edge(wait), names.label(wait.group), tuple(sorted(awaited))
        found.setdefault(key, set()).add(wait.rank)
    ordered = sorted(found.items(), key=lambda one: (-len(one[1]), one[0]))
    return tuple(Waiting(tuple(sorted(ranks)), *key) for key, ranks in ordered)


def _absent(cause: Cause, picture: Picture, names: Names) -> tuple[Absence, ...]:
    """Return the culprits by where they are, where they are absent."""
    if _TEXTS[cause.fault] is not _absence:
        return ()
    found = places(cause.culprits, picture, names, cause.waits[0])
    return tuple(Absence(tuple(ranks), where) for where, ranks in found.items())


def _line(op: IssuedOp | None) -> str:
    return str(op.line) if op is not None and op.line is not None else ""


def _groups(groups: Iterable[Group]) -> tuple[GroupKey, ...]:
    return tuple(sorted({GroupKey(one.name, one.ranks) for one in groups}))


# -- sentences -------------------------------------------------------------------


def _mismatch(cause: Cause, picture: Picture, names: Names) -> str:
    difference = cause.difference
    assert difference is not None
    if difference.splits:
        disagree = tell(difference.splits, difference.op.op)
        return f"{disagree}, in {names.op(difference.op, difference.group)}"
    sides = group_by(difference.values, difference.values.__getitem__)
    noun = _NOUNS.get(cause.fault, "")
    in_order = cause.fault is not Fault.ORDER_MISMATCH
    if not in_order and len({op.op for op in difference.ops.values()}) == 1:
        noun = _NOUNS[Fault.SIZE_MISMATCH]
    text = before = ""
    group: Group | None = difference.group
    for value, ranks in sorted(
        sides.items(), key=lambda one: (one[1][0] not in cause.culprits, one[1])
    ):
        op = difference.ops[min(ranks)]
        if names.op(op) == before:
            # The same op at the same line is named once.
            text += f", {listed(ranks)}"
        else:
            begin = " while " if text else ""
            text += f"{begin}{some(ranks)} issued {names.op(op, group)}"
        before, group = names.op(op), None
        if noun:
            text += " " + noun.format(_value(value))
    if not in_order:
        text += "; they issue the same ops in different orders"
    if len(sides) == 1:
        text += ", and no other rank has: all others are in no op"
    (scene,) = (one for one in picture.scenes if one.group == difference.group)
    if before_it := parting(difference, scene):
        told = (
            f"{some(next(one for one in sides.values() if rank in one))} issued "
            f"{names.op(op)}"
            for rank, op in sorted(
                before_it.items(), key=lambda one: one[0] not in cause.culprits
            )
        )
        text += f"; they were at different lines before that: {', '.join(told)}"
    return text


_NOUNS = {
    Fault.DTYPE_MISMATCH: "with dtype {}",
    Fault.SIZE_MISMATCH: "with {} elements",
    Fault.ROOT_MISMATCH: "with root {}",
    Fault.REDUCE_OP_MISMATCH: "with reduce op {}",
    Fault.TAG_MISMATCH: "with tag {}",
}


def _value(value: object) -> str:
    """Return ``640`` for ``((640,),)``: an array of an op of a batch."""
    while isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, tuple):
        parts = list(dict.fromkeys(map(_value, value)))
        return ", ".join(parts[:4]) + (", …" if len(parts) > 4 else "")
    return str(value)


def _hang(cause: Cause, picture: Picture, names: Names) -> str:
    wait = cause.waits[0]
    op = names.wait(wait)
    who = name_ranks(cause.culprits)
    if wait.ahead:
        ahead = {rank for one in cause.waits for rank in one.ahead}
        if picture.evidence.at_one_moment:
            return (
                f"all ranks have entered {op}, and it does not complete on {who}; "
                f"{some(ahead)} {have(ahead)} completed it"
            )
        several = len({one.seq for one in cause.waits}) > 1
        one = len(cause.culprits) == 1
        return (
            f"{who} {have(cause.culprits)} issued {op} and not completed it"
            f"{' (the first such op of each)' if several else ''}, while "
            f"{some(ahead)} {have(ahead)}: "
            f"{'its GPU or its process has' if one else _STOPPED} stopped"
        )
    both = "both sides" if wait.is_p2p else "all ranks"
    text = f"{both} have entered {op}, nothing differs, and it "
    started = {rank for one in cause.waits for rank in _in_it(one)}
    if started.isdisjoint(cause.culprits) and started:
        whose = "GPU or process has" if len(cause.culprits) == 1 else _THEIRS
        return (
            f"{text}has started on {name_ranks(started)}, not on {who}, whose {whose} "
            "not ended what was issued before"
        )
    return f"{text}does not complete on {who}"


def _in_it(wait: Wait) -> list[int]:
    """Return on which of the ranks that a wait tells of its op has started."""
    sides = [(wait.rank, wait.op)]
    if wait.op is not None and wait.op.peer is not None:
        sides.append((wait.op.peer, wait.other))
    return [rank for rank, op in sides if op is not None and op.state == "started"]


_STOPPED = "their GPUs or their processes have"
_THEIRS = "GPUs or processes have"


def _absence(cause: Cause, picture: Picture, names: Names) -> str:
    wait = cause.waits[0]
    who = some(cause.culprits)
    waiting = they_wait(_first_waits(cause), cause.culprits)
    if cause.unrecorded:
        where = whereabouts(cause.culprits, picture, names, wait)
        text = f"{who} left no records{where and f': {where}'}"
        text += f"; {waiting} in {names.wait(wait)}"
        if len(cause.culprits) > 1:
            text += f", which at least one of {who} has not entered"
        return text
    if cause.fault in (Fault.RANK_DEAD, Fault.RANK_NOT_RESPONDING):
        tell_how = deaths if cause.fault is Fault.RANK_DEAD else silences
        how = tell_how(cause.culprits, picture.evidence)
        return f"{how}; {waiting} in {names.wait(wait)}" if waiting else how
    firsts = _first_waits(cause)
    groups = {one.group for one in firsts if one.place[1:] == wait.place[1:]}
    text = f"{who} {have(cause.culprits)} not entered {names.wait(wait, *groups)}"
    if wait.other is None and wait.awaited.isdisjoint(cause.culprits):
        where = whereabouts(cause.culprits, picture, names, wait)
        # Of several in different places, each is named there.
        told = re.sub("^(it|they) ", f"{who} ", where) if where else ""
        text = f"{waiting} in {names.wait(wait)} for {some(wait.awaited)}"
        text = f"{told}; {text}" if told else text
        return f"{text}, whose error names {who}"
    if wait.other is not None:
        own = names.op(wait.other, wait.group)
        text = (
            f"{who} {have(cause.culprits)} left the program before {own} was over: a "
            "program has to wait for its ops before its end"
        )
        return f"{text}; {waiting} in {names.op(wait.op)}" if wait.op else text
    if wait.is_p2p:
        other = "recv" if wait.name == "send" else "send"
        text = f"{who} {have(cause.culprits)} not issued the {other}"
    where = whereabouts(cause.culprits, picture, names, wait)
    text = f"{text}: {where}" if where else text
    it = names.wait(wait) if wait.is_p2p else "it"
    return f"{text}; {waiting} in {it}" if waiting else text


def _first_waits(cause: Cause) -> list[Wait]:
    """Return the waits in the first op from which each culprit is absent."""
    firsts = {one.place for one in cause.waits[:1]}
    left = set(cause.culprits)
    for one in cause.waits:
        # Those of all culprits come first; one wait may be that of several.
        if not left.isdisjoint(one.awaited):
            firsts.add(one.place)
            left -= one.awaited
    return [one for one in cause.waits if one.place in firsts]


def _cycle(cause: Cause, picture: Picture, names: Names) -> str:
    ring = cause.waits
    alike = len({(wait.name, wait.op and wait.op.line) for wait in ring}) == 1
    told = []
    # Of a long ring that is alike all around, the beginning is enough.
    for waits, awaited in islice(_steps(cause), 2 if alike else MOST):
        whom = "" if direction(waits[0].op) else f" for {some(awaited)}"
        told.append(f"{some(_ranks(waits))} in {names.wait(waits[0])}{whom}")
    if len(ring) > len(told):
        told.append("and so on")
    kinds = {wait.name for wait in ring}
    advice = "issue the ops in one order on all ranks"
    if kinds == {"recv"}:
        advice = "all receive first: one of them must send first"
        if any(wait.seq > 1 for wait in ring):
            advice += ", or has left out a send"
    elif kinds == {"send"}:
        advice = "all send first: one of them must receive first"
    elif kinds <= {"send", "recv"}:
        advice = "each send needs its receive in the same place of the order"
    elif not kinds.isdisjoint({"send", "recv"}):
        advice += ", and match sends and receives"
    if len(cause.culprits) == 1:
        advice = f"without {name_ranks(cause.culprits)} there is no cycle: {advice}"
    who = some(_ranks(chain(*cause.cycle)))
    return f"{who} wait for each other: {', '.join(told)}; {advice}"


_TEXTS: dict[Fault, Callable[[Cause, Picture, Names], str]] = {
    Fault.DEADLOCK: _cycle,
    Fault.EXECUTION_HANG: _hang,
    Fault.MISSING_RANKS: _absence,
    Fault.RANK_DEAD: _absence,
    Fault.RANK_BUSY_ELSEWHERE: _absence,
    Fault.RANK_NOT_RESPONDING: _absence,
    **dict.fromkeys((*_NOUNS, Fault.OP_MISMATCH, Fault.ORDER_MISMATCH), _mismatch),
    Fault.SPLIT_MISMATCH: _mismatch,
}


# -- consequences ----------------------------------------------------------------


def _consequences(
    picture: Picture, names: Names, causes: Sequence[Cause]
) -> tuple[str, ...]:
    """Return a line for each op that waits and of which no sentence tells."""
    told = {
        wait.place
        for cause in causes
        for wait in (cause.waits if cause.difference is not None else cause.waits[:1])
        if not wait.is_p2p or cause.difference is not None
    }
    mentioned = {
        id(wait)
        for cause in causes
        for wait in chain(*cause.cycle, _first_waits(cause))
    }
    waits = [
        wait
        for wait in picture.waits
        if wait.place not in told and id(wait) not in mentioned
    ]
    lines = _lines(waits, names)
    if len(lines) > MOST:
        lines = [*lines[: MOST - 1], f"and {len(lines) - MOST + 1} more ops wait"]
    return tuple(lines)


def _lines(waits: Iterable[Wait], names: Names) -> list[str]:
    """Return one line for each op that ranks wait in, the most ranks first.

    The groups of one name that wait in one op share a line.
    """
    places = group_by(
        waits, lambda one: (one.group.name, one.name, one.seq, direction(one.op))
    )
    ordered = sorted(places.items(), key=lambda one: (-len(one[1]), one[0]))
    lines = []
    for (*_, whom), found in ordered:
        awaited = {
            rank for one in found for rank in one.absent or (one.unknown or ())
        } - {one.rank for one in found}
        groups = (one.group for one in found)
        text = f"{they_wait(found)} in {names.wait(found[0], *groups)}"
        if awaited and not whom:
            text += f" for {some(awaited)}"
        lines.append(text)
    return lines
