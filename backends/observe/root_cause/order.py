"""Which of two ops comes first in a program, as the ranks that run it alike tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from .picture import Picture
from .scene import GroupScene, Place

__all__ = ["out_of_step"]


def out_of_step(
    sides: Mapping[Place, Collection[int]], picture: Picture
) -> tuple[int, ...]:
    """Return the ranks of two ops, whose ranks wait for each other, that are at fault.

    Ranks outside of the cycle issue the same ops, in their own groups of the same
    names. Those who wait in the op that they issue later have left out the other one,
    or issue it too late. Empty: nothing tells which one that is, or they disagree.
    """
    one, other = sides
    waiting = {rank for ranks in sides.values() for rank in ranks}
    histories = {
        rank: found
        for rank in picture.evidence.ranks
        if (found := _history(rank, one, other, picture)) is not None
    }
    usual = {histories[rank].before for rank in waiting if rank in histories}
    votes = {
        found.first
        for rank, found in histories.items()
        if rank not in waiting and found.first and found.before in usual
    }
    if len(votes) != 1:
        return ()
    first = votes.pop()
    late = other if first == one else one
    return tuple(sorted(set(sides[late]).intersection(first[0].ranks)))


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
