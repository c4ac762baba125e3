"""The rules: which ranks or ops are the cause, and which only wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...rank_sets import group_by
from ..verdicts import Fault
from .absences import awaited_ranks
from .cycles import stuck_in_turn
from .differences import Difference, difference_of_pair, extra_op
from .order import (
    ahead_of_all,
    as_far_as_others,
    out_of_program,
    programs_differ,
    waits_of_few,
)
from .pairs import Match
from .picture import Cause, Picture, issue_order
from .scene import ONE_SIDED, Place, Wait

__all__ = ["find_causes"]


def find_causes(picture: Picture) -> list[Cause]:
    """Return the causes, the one that explains most first; ``[]``: nothing hangs."""
    if not picture.waits and not picture.differences:
        return []
    strong = [_narrowed(one, picture) for one in picture.differences if not one.weak]
    causes = [_of_difference(one, picture) for one in _first_of_each(strong, picture)]
    blamed = {rank for cause in causes for rank in cause.culprits}
    lags = _lags(picture, blamed)
    causes += lags
    awaited = awaited_ranks(picture, causes)
    if awaited and not causes and all(one.unrecorded for one in awaited):
        unrecorded = {rank for one in awaited for rank in one.culprits}
        awaited = stuck_in_turn(picture, unrecorded) or (
            # A rank with records may be why the one without does not come.
            [] if programs_differ(picture) else _all_at_once(awaited, picture)
        )
    has_moved = _has_moved(picture, causes, awaited)
    if has_moved:
        # Dumps of a job that runs, each from another moment, look like this.
        causes = [one for one in causes if one.difference is not None]
    else:
        awaited = [
            _of_stray(one, picture) or _of_extra(one, picture) or one for one in awaited
        ]
        causes += awaited if causes else _of_those_ahead(awaited, picture)
    if picture.evidence.is_of_counts and len(picture.scenes) > 1:
        return _seen_in_counts(causes, picture)
    if not causes:
        weak = [one for one in picture.differences if one.weak]
        causes = [_of_difference(one, picture) for one in weak[:1]]
    if causes or has_moved:
        return causes
    stuck = stuck_in_turn(picture) or _out_of_program(picture)
    return [] if _has_moved(picture, stuck, ()) else stuck


def _out_of_program(picture: Picture) -> list[Cause]:
    """Return as the cause that a rank does not come that has issued other ops."""
    ranks = out_of_program(picture)
    waits = tuple(
        one
        for one in sorted(picture.waits, key=issue_order)
        if ranks and one.absent == ranks and not one.unsure
    )
    return [Cause(Fault.MISSING_RANKS, ranks, waits)] if waits else []


def _seen_in_counts(causes: Sequence[Cause], picture: Picture) -> list[Cause]:
    """Return the causes that counts of several groups prove.

    A rank that is behind in one group may wait in another one, or for a message. That
    is not so of the only one for whom all others wait, unless a process is dead.
    """
    behind = [one for one in causes if one.fault is Fault.MISSING_RANKS]
    rest = [one for one in causes if one.fault is not Fault.MISSING_RANKS]
    late = {rank for one in behind for rank in one.culprits}
    dead = any(one.death is not None for one in picture.evidence.ranks.values())
    return behind if len(late) == 1 and not rest and not dead else rest


def _first_of_each(
    differences: Sequence[Difference], picture: Picture
) -> list[Difference]:
    """Return the first difference of each set of culprits; others follow from it."""
    found: list[Difference] = []
    for one in sorted(differences, key=lambda one: (one.op.order, one.seq)):
        touched = {rank for known in found for rank in known.culprits}
        if touched.isdisjoint(one.culprits):
            found.append(one)
    return found


def _narrowed(one: Difference, picture: Picture) -> Difference:
    """Return a difference in which no side has most ranks with the one at fault alone.

    It is the rank that has issued other ops than all that run the same program.
    """
    odd = () if one.op.is_p2p else out_of_program(picture)
    if odd and {*odd} < {*one.culprits} == one.ops.keys():
        return replace(one, culprits=odd)
    return one


def _of_difference(one: Difference, picture: Picture) -> Cause:
    waits = tuple(
        wait
        for wait in picture.waits
        if wait.group == one.group and wait.rank in one.ops
        if wait.seq == one.seq or wait.is_p2p
    )
    return Cause(one.fault, one.culprits, waits, one)


def _of_stray(cause: Cause, picture: Picture) -> Cause | None:
    """Return as the cause that a rank has sent with another tag than is received.

    Only where the right message cannot come any more: the sender has come to its end,
    or waits for the receiver in turn.
    """
    for wait in cause.waits if cause.cycle else cause.waits[:1]:
        if wait.stray is None or wait.op is None or wait.op.peer is None:
            continue
        sender = wait.op.peer
        if cause.cycle or picture.rank(sender).has_ended_well:
            match = Match(wait.group, sender, wait.stray, wait.rank, wait.op)
            difference = difference_of_pair(match, True)
            return None if difference is None else _of_difference(difference, picture)
    return None


def _of_those_ahead(awaited: Sequence[Cause], picture: Picture) -> Sequence[Cause]:
    """Return as the cause that one rank is ahead of all others, if nothing tells more.

    Where several are ahead, the many others may as well be late, all at once: none. Nor
    are several ranks late, each for itself, or one that has come as far as its like.
    """
    if any(one.fault is not Fault.MISSING_RANKS for one in awaited):
        return awaited
    waits = ahead_of_all(picture)
    if len(waits) != 1:
        late = {rank for one in awaited for rank in one.culprits}
        if not waits_of_few(picture) or any(picture.rank(one).fate for one in late):
            return awaited
        certain = len(awaited) == 1 and not as_far_as_others(late, picture)
        return awaited if certain and not waits else ()
    (wait,) = waits
    assert wait.op is not None
    if not any(
        picture.has_begun(rank) for rank in picture.evidence.ranks.keys() - {wait.rank}
    ):
        # None of the others has begun: nothing tells what comes next.
        return awaited
    values, ops = {wait.rank: wait.name}, {wait.rank: wait.op}
    found = Difference(
        Fault.OP_MISMATCH, wait.group, wait.seq, (wait.rank,), values, ops
    )
    return [Cause(found.fault, found.culprits, (), found)]


def _of_extra(cause: Cause, picture: Picture) -> Cause | None:
    """Return as the cause that a few ranks issued an op more than those absent.

    Not where it is known why these do not come.
    """
    wait = cause.waits[0]
    absent = Fault.MISSING_RANKS, Fault.RANK_BUSY_ELSEWHERE
    if cause.fault not in absent or not all(
        map(picture.is_unexplained, cause.culprits)
    ):
        return None
    scene = next(one for one in picture.scenes if one.group == wait.group)
    found = None if wait.is_p2p else extra_op(scene, wait.seq)
    if found is None or not set(found.culprits).isdisjoint(cause.culprits):
        return None
    return Cause(found.fault, found.culprits, (), found)


def _lags(picture: Picture, blamed: set[int]) -> list[Cause]:
    """Return ranks whose ops do not complete although they have for other ranks."""
    behind: dict[int, list[Wait]] = defaultdict(list)
    differ = {(one.group, one.seq) for one in picture.differences}
    for wait in picture.waits:
        if (wait.group, wait.seq) in differ:
            continue
        if wait.unknown and wait.name in ONE_SIDED:
            # Those ahead do not show that these were in it.
            continue
        one = picture.rank(wait.rank)
        if wait.op is None and one.overrun and one.read_ns is None:
            # A counter alone tells, and counters lag in a job that runs.
            continue
        if wait.ahead and not wait.is_p2p and wait.rank not in blamed:
            behind[wait.rank].append(wait)
    for rank, wait in _behind_in_messages(picture).items():
        if rank not in blamed:
            behind[rank].append(wait)
    first = {rank: min(waits, key=issue_order) for rank, waits in behind.items()}
    for wait in picture.waits:
        # It is not in this one yet where it waits for an absent rank before.
        behind_in = first.get(wait.rank)
        if (
            behind_in is not None
            and not wait.unsure
            and any(rank not in behind for rank in wait.absent)
            # As early: a reduce ends on ranks that have sent, without the absent one.
            and issue_order(wait) <= issue_order(behind_in)
        ):
            del first[wait.rank]
    _leave_out_one_sided(first, picture)
    _leave_out_later(first, picture)
    return [
        Cause(Fault.EXECUTION_HANG, tuple(sorted(ranks)), waits)
        for ranks, waits in _alike(first)
        # Where most of a group lag, its counters are rather not what they seem.
        if picture.evidence.at_one_moment
        or not any(_most_lag(wait, behind) for wait in waits)
    ]


def _behind_in_messages(picture: Picture) -> dict[int, Wait]:
    """Return ranks whose first op is messages that are over on all other sides.

    Not over gloo, where a message is in flight until somebody waits for it.
    """
    found: dict[int, list[Wait]] = defaultdict(list)
    for wait in sorted(picture.waits, key=issue_order):
        found[wait.rank].append(wait)
    behind = {}
    for rank, (first, *rest) in found.items():
        batch = _batch(first)
        together = [one for one in rest if batch is not None and _batch(one) == batch]
        if (
            first.is_p2p
            and picture.rank(rank).groups[first.group].ends_sends
            and all(one.ahead and not one.unsure for one in (first, *together))
        ):
            behind[rank] = first
    return behind


def _batch(wait: Wait) -> int | None:
    return None if wait.op is None else wait.op.batch


def _leave_out_one_sided(first: dict[int, Wait], picture: Picture) -> None:
    """Leave out of the ranks that lag those that may do so because of another one.

    The root of a reduce or gather waits for all others, and who comes after another
    rank in the ring of a broadcast or reduce for that one. Where nothing tells which
    rank is the root, any of them may be.
    """
    at_once = picture.evidence.at_one_moment
    for ranks in group_by(first, lambda rank: first[rank].place).values():
        name = first[ranks[0]].name
        if len(ranks) == 1 or name not in ONE_SIDED:
            continue
        ops = {rank: op for rank in ranks if (op := first[rank].op) is not None}
        size = len(first[ranks[0]].group.ranks)
        roots = {op.root for op in ops.values() if op.root is not None}
        # Torch does not record it: of a gather, the root alone has so many outputs.
        roots |= {
            rank
            for rank, op in ops.items()
            if name == "gather" and len(op.arrays.outputs or ()) == size
        }
        left_out = {*ranks}
        if name not in ("reduce", "gather"):
            left_out = set() if at_once else left_out
        elif roots and (at_once or name == "gather" or len(left_out - roots) == 1):
            left_out &= roots
        for rank in left_out:
            del first[rank]


def _leave_out_later(first: dict[int, Wait], picture: Picture) -> None:
    """Leave out of the ranks that lag those that hang in an op before, all together.

    Where one of its ranks does not lag later, the op may hang because of the others.
    """
    held: dict[Place, list[int]] = defaultdict(list)
    for wait in picture.waits:
        lag = first.get(wait.rank) if wait.is_full and not wait.is_p2p else None
        if lag is not None and issue_order(wait) < issue_order(lag):
            held[wait.place].append(wait.rank)
    for (group, *_), ranks in held.items():
        if len(ranks) == len(group.ranks):
            for rank in ranks:
                first.pop(rank, None)


def _all_at_once(causes: Sequence[Cause], picture: Picture) -> list[Cause]:
    """Return ranks without records, for which the others wait, as one cause.

    Each may wait for another one, or for a rank of its groups that is in no op: then
    that one may be why it does not come.
    """
    ranks = {rank for one in causes for rank in one.culprits}
    groups = [one for one in picture.evidence.groups if not ranks.isdisjoint(one.ranks)]
    for rank in {rank for group in groups for rank in group.ranks} - ranks:
        if picture.may_wait(rank) or picture.is_idle(rank):
            return []
    waits = tuple(wait for one in causes for wait in one.waits)
    return [replace(causes[0], culprits=tuple(sorted(ranks)), waits=waits)]


def _has_moved(
    picture: Picture, known: Sequence[Cause], awaited: Sequence[Cause]
) -> bool:
    """Return whether the job rather ran while its dumps were written.

    In a job that hangs, a rank for which nobody waits would wait itself. Where no time
    tells how long others do, a rank that was at work speaks against it, too.
    """
    stuck = [one for one in known if one.difference is None]
    culprits = {rank for one in (*known, *awaited) for rank in one.culprits}
    if (
        not (stuck or awaited)
        or picture.evidence.at_one_moment
        or any(picture.rank(rank).fate is not None for rank in culprits)
    ):
        return False
    ranks = picture.evidence.ranks
    absent = {rank for one in awaited for rank in one.culprits}
    is_idle = any(rank not in absent and picture.is_idle(rank) for rank in ranks)
    if stuck and awaited and is_idle:
        return True
    waiting = {wait.rank for one in (*stuck, *awaited) for wait in one.waits}
    if any(picture.rank(rank).read_ns is not None for rank in waiting):
        return False
    return any(map(picture.was_active, ranks)) or (is_idle and bool(picture.stale))


def _most_lag(wait: Wait, behind: Collection[int]) -> bool:
    ranks = wait.group.ranks
    return 2 * len(set(behind).intersection(ranks)) > len(ranks)


def _alike(waits: Mapping[int, Wait]) -> list[tuple[list[int], tuple[Wait, ...]]]:
    """Return ranks whose op has one name, in groups of one name, together."""
    sets = group_by(sorted(waits), lambda one: (waits[one].group.name, waits[one].name))
    return [(ranks, tuple(waits[rank] for rank in ranks)) for ranks in sets.values()]
