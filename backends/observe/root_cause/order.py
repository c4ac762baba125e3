"""What the ranks that run one program tell: which op comes next, and who is ahead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ...rank_sets import group_by
from .picture import Picture, issue_order
from .scene import GroupScene, Place, Wait

__all__ = [
    "ahead_of_all",
    "as_far_as_others",
    "out_of_program",
    "out_of_step",
    "programs_differ",
    "waits_of_few",
]


def out_of_step(
    sides: Mapping[Place, Collection[int]], picture: Picture
) -> tuple[int, ...]:
    """Return the ranks of two ops, whose ranks wait for each other, that are at fault.

    Ranks outside of the cycle issue the same ops, in their own groups of the same
    names. Those who wait in the op that they issue later have left out the other one,
    or issue it too late. Empty: nothing tells which one that is, or they disagree.
    """
    one, other = sides
    # What came before either of them may tell.
    firsts = _firsts(one, other, sides, picture) | _firsts(other, one, sides, picture)
    if len(firsts) != 1:
        return ()
    first = firsts.pop()
    late = other if first == one else one
    return tuple(sorted(set(sides[late]).intersection(first[0].ranks)))


def _firsts(
    one: Place,
    other: Place,
    sides: Mapping[Place, Collection[int]],
    picture: Picture,
) -> set[Place]:
    """Return which op others issued first, of those who had been where ranks wait."""
    waiting = {rank for ranks in sides.values() for rank in ranks}
    histories = {
        rank: found
        for rank in picture.evidence.ranks
        if (found := _history(rank, one, other, picture)) is not None
    }
    usual = {histories[rank].before for rank in waiting if rank in histories}
    return {
        found.first
        for rank, found in histories.items()
        if rank not in waiting and found.first and found.before in usual
    }


class _History(NamedTuple):
    """How one rank issued the two ops, in its own groups."""

    #: How many ops of the second kind came before the previous one of the first kind:
    #: equal for ranks that run the same program.
    before: int
    #: The one that it has issued before the other.
    first: Place | None


def _history(rank: int, one: Place, other: Place, picture: Picture) -> _History | None:
    ours, theirs = _scene(rank, one, picture), _scene(rank, other, picture)
    if ours is None or theirs is None:
        return None
    (_, seq, _), (_, number, _) = one, other
    before = 0
    if seq > 1:
        previous = ours.op(rank, seq - 1)
        if previous is None:
            return None
        begun = [op.seq for op in theirs.at[rank].ops if op.order < previous.order]
        before = max(begun, default=0)
    elif number > 1:
        return None
    issued = ours.issued[rank] - seq, theirs.issued[rank] - number
    op, another = ours.op(rank, seq), theirs.op(rank, number)
    first = None
    if issued[0] >= 0 and issued[1] == -1:
        first = one
    elif issued[1] >= 0 and issued[0] == -1:
        first = other
    elif op is not None and another is not None:
        first = one if op.order < another.order else other
    return _History(before, first)


def _scene(rank: int, place: Place, picture: Picture) -> GroupScene | None:
    """Return the group of `rank` that has the name of the group of `place`."""
    found = [
        scene
        for scene in picture.scenes
        if scene.group.name == place[0].name and rank in scene.issued
    ]
    # Of its own groups, which may have one name, the one of the op.
    own = [scene for scene in found if scene.group == place[0]] or found
    return own[0] if len(own) == 1 else None


def waits_of_few(picture: Picture) -> dict[int, Wait]:
    """Return what few ranks wait in where all others are in no op.

    Were one of the others late, more of those that run its program would wait. So these
    few have issued an op too many, or all others are somewhere that is not recorded.
    """
    ordered = sorted(picture.waits, key=issue_order)
    first = {wait.rank: wait for wait in reversed(ordered)}
    known = picture.evidence.ranks
    rest = {rank: one for rank, one in known.items() if rank not in first}
    if (
        picture.evidence.at_one_moment
        or len(known) < (picture.evidence.world_size or 0)
        or not 0 < len(first) < len(rest)
        or not all(
            picture.is_out(rank) and picture.is_unexplained(rank) for rank in rest
        )
        or any(one.location or one.death or one.silence for one in rest.values())
    ):
        return {}
    return first


def ahead_of_all(picture: Picture) -> tuple[Wait, ...]:
    """Return what few ranks wait in, one op, where all others are just before it."""
    first = waits_of_few(picture)
    rest = picture.evidence.ranks.keys() - first.keys()
    ahead = {one.rank for one in picture.waits if _is_ahead(one, rest, picture)}
    ops = {(one.group.name, one.name, one.seq) for one in first.values()}
    return tuple(first.values()) if len(ops) == 1 and first.keys() <= ahead else ()


def as_far_as_others(ranks: Collection[int], picture: Picture) -> bool:
    """Return whether others, that are in no op, have come as far as each of `ranks`.

    As far as is known: dumps of active ops alone may not count those of a group, or of
    none; then they may have.
    """
    issued: dict[int, dict[str, tuple[int, int | None]]] = defaultdict(dict)
    for scene in picture.scenes:
        for rank, number in scene.issued.items():
            issued[rank][scene.group.name] = number, scene.last_p2p(rank)
    idle = [
        rank
        for rank in picture.evidence.ranks
        if rank not in ranks and picture.is_idle(rank)
    ]
    if not issued.keys() >= {*idle}:
        return True
    others = [issued[rank] for rank in idle]

    def alike(one: dict[str, tuple[int, int | None]]) -> bool:
        shared = [one.keys() & other.keys() for other in others]
        return any(
            any(any(one[name]) for name in names)
            and all(one[name] == other[name] for name in names)
            for names, other in zip(shared, others, strict=True)
        )

    return all(rank in issued and alike(issued[rank]) for rank in ranks)


def _is_ahead(wait: Wait, rest: Collection[int], picture: Picture) -> bool:
    """Return whether `rest` are just before the op of `wait`, or before its like.

    For a send or receive, those that have the place of its rank in a group of that name
    are; and those with the place of its peer are all where that one is.
    """
    if wait.op is None or wait.unknown:
        return False
    scenes = [one for one in picture.scenes if one.group.name == wait.group.name]
    if not wait.is_p2p:
        issued = [
            one.issued[rank]
            for one in scenes
            for rank in one.group.ranks
            if rank in rest and rank in one.issued
        ]
        owed = {
            peer
            for one in picture.waits
            if one.is_p2p and one.rank == wait.rank
            for peer in one.absent
        }
        # What only some need for their part may be over before. Where a message of
        # some is not, it is these that are late.
        at_once = owed.isdisjoint(rest) or owed.issuperset(rest)
        return at_once and len({*issued}) == 1 < len(issued) and issued[0] < wait.seq
    if wait.op.peer is None:
        return False
    own, other = map(wait.group.ranks.index, (wait.rank, wait.op.peer))
    like = [one for one in scenes if len(one.group.ranks) == len(wait.group.ranks)]
    before = {
        one.last_p2p(one.group.ranks[own]) for one in like if one.group != wait.group
    }
    return before == {wait.seq - 1} and (
        len({one.last_p2p(one.group.ranks[other]) for one in like}) == 1
    )


def programs_differ(picture: Picture) -> bool:
    """Return whether ranks that run the same program have issued other ops.

    One of them has left out an op, or issued one too many.
    """
    return (
        _pipelines_differ(picture) or _orders_differ(picture) or _lacks_receive(picture)
    )


def _lacks_receive(picture: Picture) -> bool:
    """Return whether a receiver is in an op that its sender issued after the message.

    It may also receive the message after that op: it is not certain who is at fault.
    """
    inside = {(one.rank, one.place) for one in picture.waits}
    return any(
        (peer, later.place) in inside
        for send in picture.waits
        if send.name == "send"
        for later in picture.waits
        if later.rank == send.rank and issue_order(send) < issue_order(later)
        for peer in send.absent
    )


def out_of_program(picture: Picture) -> tuple[int, ...]:
    """Return the rank that has issued other ops than all that run the same program.

    It has left out an op, or issued one too many, or in another order. Empty: there is
    none, or several ranks differ.
    """
    alone: set[int] = set()
    one_of_two: list[Collection[int]] = []
    for places in picture.program_places.values():
        sides = sorted(group_by(places, places.__getitem__).values(), key=len)
        if len(sides) > 2 or (len(sides) == 2 and len(sides[0]) > 1):
            return ()
        if len(places) == len(sides) == 2:
            one_of_two.append(places)
        elif len(sides) == 2:
            alone.update(sides[0])
    sure = len(alone) == 1 and all(alone.issubset(pair) for pair in one_of_two)
    return (*alone,) if sure else ()


def _orders_differ(picture: Picture) -> bool:
    return any(
        len({*places.values()}) > 1 for places in picture.program_places.values()
    )


def _pipelines_differ(picture: Picture) -> bool:
    """Return whether ranks with one place in groups of one name send or receive unlike.

    One of them has left out a message, or issued one too many.
    """
    issued: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for scene in picture.scenes:
        name, ranks = scene.group.name, scene.group.ranks
        for rank, found in scene.known.items() if scene.has_p2p else ():
            batches = group_by(
                (op for op in found.ops if op.is_p2p and op.peer in ranks),
                lambda op: op.seq,
            )
            # The first one that is listed may lack some of its ops.
            for seq in sorted(batches)[not found.lists_all :]:
                key = name, len(ranks), ranks.index(rank), seq
                ops = [
                    (op.op, ranks.index(op.peer or 0), str(op.line))
                    for op in batches[seq]
                ]
                issued.setdefault(key, set()).add((*ops,))
    return any(len(alike) > 1 for alike in issued.values())
