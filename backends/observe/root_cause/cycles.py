"""Ranks that wait for each other, and ops that all ranks have issued."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..evidence import IssuedOp, State
from ..verdicts import Fault
from .graph import components, final_components, is_acyclic, shortest_cycle
from .order import out_of_program, out_of_step
from .picture import Cause, Picture, issue_order
from .scene import Place, Wait

__all__ = ["cycle_of", "stuck_in_turn"]


def cycle_of(
    members: Sequence[int],
    edges: Mapping[int, Iterable[int]],
    inside: Sequence[Wait],
    picture: Picture,
) -> list[Cause]:
    """Return ranks that wait for each other in the ops `inside` as one cause.

    None where one of them may have completed its side of an op: then the GPU of the
    other side may have stopped.
    """
    known = picture.evidence.at_one_moment
    certain = known or _is_balanced(inside)
    if not certain and is_acyclic(members, _certain(edges, inside)):
        return []
    ring = shortest_cycle(members, edges)
    through = [rank for rank in ring if is_acyclic({*members} - {rank}, edges)]
    if len(through) == 1:
        # First who waits for the one that is in all cycles.
        start = ring.index(through[0]) - 1
        ring = ring[start:] + ring[:start]
    ordered = sorted(inside, key=issue_order)
    told = []
    for rank, following in zip(ring, (*ring[1:], ring[0]), strict=True):
        first = next(
            wait
            for wait in ordered
            if wait.rank == rank and following in {*wait.awaited, *_others(wait)}
        )
        told.append((first, *_alike(first, set(ring), ordered)))
    turns = dict.fromkeys(first.place for first, *_ in told)
    sides: dict[Place, set[int]] = defaultdict(set)
    for wait in inside:
        sides[wait.place].add(wait.rank)
    pair = {place: sides[place] for place in turns} if through else sides
    has_p2p = any(wait.is_p2p for wait in inside)
    between_two = len(pair) == 2 and not any(first.is_p2p for first, *_ in told)
    culprits: Iterable[int] = members
    sizes = sorted(map(len, sides.values()))
    if (differs := out_of_program(picture)) and differs[0] in members:
        culprits = differs
    elif len(through) == 1 and not all(wait.is_p2p for wait in inside):
        culprits = through
    elif between_two and (odd := out_of_step(pair, picture)):
        culprits = odd
    elif has_p2p:
        culprits = ring if through else members
    elif len(sides) == 2 and sizes[0] < sizes[1]:
        # Most ranks are in one op: those in the other have another order.
        culprits = sorted(sides.values(), key=len)[0]
    waits = tuple(first for first, *_ in told)
    named = tuple(sorted(culprits))
    return [Cause(Fault.DEADLOCK, named, waits, cycle=tuple(told))]


def _is_balanced(inside: Sequence[Wait]) -> bool:
    """Return whether no message between all ranks of a group is over on one side alone.

    Each counts on two ranks: where one GPU has stopped in such a message, the sum of
    what the ranks have issued before is odd.
    """
    return (
        {wait.rank for wait in inside} == {*inside[0].group.ranks}
        and len(inside) == len(inside[0].group.ranks)
        and sum(wait.seq - 1 for wait in inside) % 2 == 0
        and all(
            wait.group == inside[0].group
            and wait.op is not None
            and wait.is_p2p
            and wait.op.batch is None
            for wait in inside
        )
    )


def _certain(
    edges: Mapping[int, Iterable[int]], inside: Iterable[Wait]
) -> dict[int, set[int]]:
    """Return `edges` without those to ranks that may have completed their side."""
    found: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    for wait in inside:
        for other in {*wait.awaited, *_others(wait)}:
            doubtful = wait.unsure or other in wait.unknown
            found[doubtful].add((wait.rank, other))
    guessed = found[True] - found[False]
    return {
        rank: {other for other in others if (rank, other) not in guessed}
        for rank, others in edges.items()
    }


def _alike(
    first: Wait, ring: Collection[int], inside: Sequence[Wait]
) -> Iterable[Wait]:
    """Return the waits of ranks outside of the ring that are in the same op alone."""
    waits = Counter(wait.rank for wait in inside)
    return (
        wait
        for wait in inside
        if wait.rank not in ring
        and waits[wait.rank] == 1
        and not wait.is_p2p
        and wait.place == first.place
        and _line(wait) == _line(first)
    )


def _line(wait: Wait) -> str:
    return str(wait.op.line) if wait.op is not None else ""


def stuck_in_turn(picture: Picture, aside: Collection[int] = ()) -> list[Cause]:
    """Return cycles and hangs of ops that all ranks have issued, beside ranks `aside`.

    Ranks that wait for each other do so whatever those `aside` do. A rank may issue ops
    long before they run, one after the other: the one that it is in is its first one,
    and who is in an earlier op is not in this one yet.
    """
    current = _current(picture)
    edges: dict[int, set[int]] = {}
    for rank, waits in current.items():
        found = edges.setdefault(rank, set())
        for wait in waits:
            for other in _others(wait):
                there = current.get(other)
                if there and not any(_has_come(one, wait) for one in there):
                    found.add(other)
            found |= {*wait.absent, *wait.unknown} - {rank, *aside}
    causes: list[Cause] = []
    full: dict[tuple[object, ...], list[Wait]] = defaultdict(list)
    final = final_components(edges)
    held = _held(current)
    for members in components(edges) if aside else final:
        if len(members) > 1:
            inside = [wait for rank in members for wait in current.get(rank, ())]
            causes += cycle_of(members, edges, inside, picture)
        elif members in final:
            waits = current.get(members[0], [])
            if waits and members[0] in held:
                full[_meeting(waits[0])].append(waits[0])
    if causes or any(one.overrun for one in picture.evidence.ranks.values()):
        # An op that hangs may be one that is left out.
        return causes
    hangs: dict[tuple[int, ...], list[Wait]] = defaultdict(list)
    for waits in full.values():
        states = {one.rank: _state(one.op) for one in waits}
        for one in waits:
            for other in _others(one):
                states.setdefault(other, _state(one.other))
        behind = _behind(states)
        if behind or not any(one.unsure for one in waits):
            hangs[behind or tuple(sorted(states))] += waits
    return [
        Cause(Fault.EXECUTION_HANG, ranks, tuple(waits))
        for ranks, waits in hangs.items()
    ]


def _state(op: IssuedOp | None) -> State:
    return "unknown" if op is None else op.state


def _behind(states: Mapping[int, State]) -> tuple[int, ...]:
    """Return the ranks on which an op has not begun, if it has on all others."""
    if "started" not in states.values() or "unknown" in states.values():
        return ()
    return tuple(rank for rank, state in sorted(states.items()) if state == "scheduled")


def _current(picture: Picture) -> dict[int, list[Wait]]:
    """Return the op that each rank is in; of a batch, all of its ops."""
    found: dict[int, list[Wait]] = defaultdict(list)
    for wait in sorted(picture.waits, key=issue_order):
        found[wait.rank].append(wait)
    current = {}
    for rank, waits in found.items():
        started = [one for one in waits if one.op and one.op.state == "started"]
        first = (started or waits)[0]
        batch = first.op.batch if first.op is not None else None
        together = [
            one
            for one in waits
            if one is first
            or (batch is not None and one.op is not None and one.op.batch == batch)
        ]
        # What has come to its other side holds a batch no more.
        current[rank] = [one for one in together if not one.ahead] or together
    return current


def _held(current: Mapping[int, Sequence[Wait]]) -> set[int]:
    """Return the ranks of which all ops have all sides, as have those of these sides.

    A batch waits for each of its messages: along a ring, all ranks wait for the one
    whose message does not come.
    """
    held = {
        rank
        for rank, waits in current.items()
        if all(_is_held_in(wait, current) for wait in waits)
    }
    with_rank: dict[int, set[int]] = defaultdict(set)
    for rank in held:
        for other in {one for wait in current[rank] for one in _others(wait)}:
            with_rank[other].add(rank)
    left = [rank for rank in current if rank not in held]
    while left:
        found = with_rank[left.pop()] & held
        held -= found
        left += found
    return held


def _is_held_in(wait: Wait, current: Mapping[int, Sequence[Wait]]) -> bool:
    """Return whether all sides of an op are in it, and in nothing that lacks one.

    A send or receive in the same batch may lack one that comes later.
    """
    mine = current.get(wait.rank, ())
    return wait.is_full and all(
        one.is_full
        and (wait.rank not in _others(one) or any(_is_same(one, its) for its in mine))
        for other in _others(wait)
        for one in current.get(other, ())
    )


def _meeting(wait: Wait) -> tuple[object, ...]:
    """Return a key that is equal for all sides of an op."""
    if not wait.is_p2p:
        return wait.place
    return wait.group, *sorted({wait.rank, *_others(wait)})


def _others(wait: Wait) -> tuple[int, ...]:
    if not wait.is_p2p:
        return tuple(one for one in wait.group.ranks if one not in wait.ahead)
    peer = wait.op.peer if wait.op is not None else None
    return () if peer is None or wait.ahead else (peer,)


def _has_come(one: Wait, wait: Wait) -> bool:
    """Return whether a rank that waits in `one` has come to the op of `wait`.

    A later one of the group tells so where its records do not tell that this is over.
    """
    later = one.group == wait.group and one.seq > wait.seq
    return _is_same(wait, one) or (later and not (one.is_p2p or wait.is_p2p))


def _is_same(wait: Wait, one: Wait) -> bool:
    """Return whether `one`, of another rank, is the same op as `wait`."""
    if wait.is_p2p:
        return wait.other is not None and wait.other is one.op
    return wait.place == one.place
