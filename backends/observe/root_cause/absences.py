"""The ranks for whom all others wait, and who wait for nobody."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from ..evidence import Group
from ..verdicts import Fault
from .cycles import cycle_of
from .graph import final_components
from .picture import Cause, Picture, issue_order
from .scene import ONE_SIDED, GroupScene, Place, Wait

__all__ = ["awaited_ranks"]


#: Faults of a rank that has issued other ops than its peers.
_OTHER_OPS = Fault.OP_MISMATCH, Fault.ORDER_MISMATCH


def awaited_ranks(picture: Picture, known: Sequence[Cause]) -> list[Cause]:
    """Return further causes beside those that are `known`."""
    blamed = {rank for one in known for rank in one.culprits}
    has_cause = bool(known)
    astray = {rank for one in known if one.fault in _OTHER_OPS for rank in one.culprits}
    edges, awaited = _who_awaits(picture, has_cause, astray)
    waiting = {wait.rank for wait in picture.waits}
    free: dict[int, list[Wait]] = {}
    causes: list[Cause] = []
    for members in final_components(edges):
        if not blamed.isdisjoint(members):
            continue
        if len(members) > 1:
            if any(one.lacks_peer and one.rank in members for one in picture.waits):
                # The rank for which it waits there may be why all of them do.
                continue
            inside = [
                wait
                for wait in picture.waits
                if wait.rank in members
                and not {*wait.absent, *wait.unknown, *wait.any_of}.isdisjoint(members)
            ]
            causes += cycle_of(members, edges, inside, picture)
        elif members[0] in waiting and picture.rank(members[0]).death is None:
            # It is in an op that all ranks are in, or of which little is known.
            continue
        elif picture.may_wait(members[0]):
            continue
        else:
            free[members[0]] = awaited[members[0]]
    telling = _worth_telling(
        free, {*edges, *blamed}, picture, has_cause, has_cycles=bool(causes)
    )
    return causes + _absences(telling, picture)


def _who_awaits(
    picture: Picture, has_cause: bool, astray: Collection[int]
) -> tuple[dict[int, set[int]], dict[int, list[Wait]]]:
    """Return rank → those it waits for, and rank → the waits for it.

    Where those that are `astray` wait, nobody else may ever come.
    """
    edges: dict[int, set[int]] = defaultdict(set)
    awaited: dict[int, list[Wait]] = defaultdict(list)
    differ = {(one.group, one.seq) for one in picture.differences}
    held_back = _held_back(picture)
    for wait in picture.waits:
        if wait.rank in astray:
            continue
        if not wait.is_p2p and (wait.group, wait.seq) in differ:
            # Who has not entered it comes after what is wrong with it.
            continue
        targets = (*wait.absent, *_unable(wait, picture))
        if not targets and wait.place not in held_back:
            # Ranks with records may be in what hangs from that cause, unseen.
            told = has_cause and all(picture.rank(one).recorded for one in wait.unknown)
            targets = wait.unknown if not told and _is_telling(wait, picture) else ()
        if wait.unsure and has_cause:
            # It may be over on the other side, and hang here from that cause.
            continue
        for rank in targets:
            if rank != wait.rank:
                edges[wait.rank].add(rank)
                awaited[rank].append(wait)
    waiting = {wait.rank for wait in picture.waits}
    for wait in picture.waits:
        # One of several is enough: who it is is known where there is one alone, and
        # it does not matter where none of them can.
        if wait.lacks_peer and not (wait.group.complete and len(wait.any_of) == 1):
            continue
        able = [one for one in wait.any_of if one not in waiting]
        if wait.any_of and (len(wait.any_of) == 1 or not able):
            for rank in wait.any_of:
                edges[wait.rank].add(rank)
                awaited[rank].append(wait)
    for rank, other in _ended_by_others(picture, awaited, edges):
        # It waits for nobody any more: the other one is why it does not come.
        edges[rank].add(other)
        awaited[other] += awaited[rank]
    for rank in [one for one in edges if picture.rank(one).death is not None]:
        del edges[rank]
    return edges, awaited


def _worth_telling(
    free: Mapping[int, list[Wait]],
    waiting: Collection[int],
    picture: Picture,
    has_cause: bool,
    *,
    has_cycles: bool,
) -> dict[int, list[Wait]]:
    """Return which of the ranks that are `free` are absent for sure."""
    known = {rank: waits for rank, waits in free.items() if _has_facts(rank, picture)}
    if not known and not has_cycles and not has_cause:
        known = {**free}
    elif not has_cause:
        held = {*waiting, *known}
        for rank, waits in free.items():
            if rank not in known and not _may_wait(rank, waits, held, picture):
                known = {**known, rank: waits}
    return known


def _ended_by_others(
    picture: Picture, awaited: Collection[int], edges: Collection[int]
) -> list[tuple[int, int]]:
    """Return ranks that an op's error has ended, each with one at fault for it.

    One that the error names, where the rank has no op of its `edges` that tells more; a
    dead rank of the op's group, or one that issued the op unlike the others.
    """
    found = []
    for rank in sorted(awaited):
        one = picture.rank(rank)
        others = [] if rank in edges else [*(one.ended_by or ())]
        if one.failed_in is not None:
            ranks = one.failed_in.ranks
            others += [two for two in ranks if picture.rank(two).death is not None]
        for difference in picture.differences:
            op = None if one.ended_by is None else difference.ops.get(rank)
            failed = op is not None and op.state != "completed"
            if (failed or difference.group == one.failed_in) and not difference.weak:
                others += difference.culprits
        found += [(rank, other) for other in others if other != rank]
    return found


def _unable(wait: Wait, picture: Picture) -> tuple[int, ...]:
    """Return the ranks of which nothing is known in an op and that will not come to it.

    They are dead, do not answer, an error has ended them, or they have left the
    program: not after their part, which no op that needs all ranks would have let them
    do alone.
    """
    needs_all = not wait.is_p2p and wait.name not in ONE_SIDED
    return tuple(
        rank
        for rank in wait.unknown
        if (one := picture.rank(rank)).death is not None
        or one.silence is not None
        or (one.exception is not None and not one.recorded)
        or (one.has_left and needs_all)
    )


def _may_wait(
    rank: int, waits: Sequence[Wait], held: set[int], picture: Picture
) -> bool:
    """Return whether `rank`, of which nothing is known, may itself wait for others.

    It may wait in a group with a rank that does not go on either: for the first op
    there that is not over. Not so if those who wait for it have their own op of that
    kind and number after the one in which they wait, or in the same group: it would
    have come past that one, too.
    """
    scenes = {scene.group: scene for scene in picture.scenes}
    waiting = {wait.rank for wait in waits}
    for group, scene in scenes.items():
        if rank not in group.ranks or held.isdisjoint({*group.ranks} - {rank}):
            continue
        if scene.has_p2p:
            return True
        following = max(scene.completed.values(), default=0) + 1
        if waiting.isdisjoint(group.ranks) and not any(
            _comes_after(following, group, wait, scenes) for wait in waits
        ):
            return True
    return False


def _comes_after(
    seq: int, group: Group, wait: Wait, scenes: Mapping[Group, GroupScene]
) -> bool:
    """Return whether the rank of `wait` issues `seq`, in its like of `group`, later."""
    if wait.is_p2p or wait.op is None:
        return False
    for other, scene in scenes.items():
        if other.name == group.name and wait.rank in other.ranks:
            op = scene.op(wait.rank, seq)
            if op is not None:
                return op.order > wait.op.order
            return scene.issued.get(wait.rank, seq) < seq
    return False


def _held_back(picture: Picture) -> set[Place]:
    """Return ops that a rank has issued and not come to: it is in an earlier one.

    The earlier one may be what holds the others, too. A send may go on by itself.
    """
    first: dict[int, Wait] = {}
    found = set()
    for wait in sorted(picture.waits, key=issue_order):
        if wait.rank in first:
            found.add(wait.place)
        elif wait.name != "send":
            first[wait.rank] = wait
    return found


def _is_telling(wait: Wait, picture: Picture) -> bool:
    """Return whether it is likely that the ranks of which nothing is known are late.

    All others are in. A few without records may be what ended the job; where there are
    more, a part of the files is rather not here. A live rank would answer, and one on a
    host that was read has left something.
    """
    evidence = picture.evidence
    elsewhere = not evidence.ranks.keys() >= set(wait.unknown)
    if (
        evidence.at_one_moment
        or (evidence.may_lack_hosts and elsewhere)
        or wait.ahead
        or not evidence.unread.isdisjoint(wait.unknown)
        or not picture.stale.isdisjoint(wait.unknown)
    ):
        return False
    recorded = sum(one.recorded for one in evidence.ranks.values())
    if len(evidence.ranks) < 2 and not wait.group.complete:
        # That there is another one is all that is known of the group.
        return False
    size = evidence.world_size or recorded
    few = size - recorded <= max(1, size // 4)
    return few and (wait.is_p2p or 2 * len(wait.unknown) <= len(wait.group.ranks))


def _has_facts(rank: int, picture: Picture) -> bool:
    one = picture.rank(rank)
    return one.recorded or one.fate is not None


def _absences(free: Mapping[int, Sequence[Wait]], picture: Picture) -> list[Cause]:
    sets: dict[tuple[Fault, bool, str, str], dict[int, list[Wait]]] = {}
    for rank, waits in sorted(free.items()):
        first = _missed_first(rank, waits, picture)
        one = picture.rank(rank)
        fault = Fault.MISSING_RANKS
        if one.death is not None:
            fault = Fault.RANK_DEAD
        elif one.silence is not None:
            fault = Fault.RANK_NOT_RESPONDING
        elif one.location is not None and not (one.fate or one.ended_with):
            fault = Fault.RANK_BUSY_ELSEWHERE
        unrecorded = not _has_facts(rank, picture)
        key = fault, unrecorded, first.group.name, first.name
        rest = [wait for wait in waits if wait is not first]
        sets.setdefault(key, {})[rank] = [first, *rest]
    causes = []
    for (fault, unrecorded, *_), found in sets.items():
        firsts = [waits[0] for waits in found.values()]
        rest = [wait for waits in found.values() for wait in waits[1:]]
        waits = tuple({id(wait): wait for wait in [*firsts, *rest]}.values())
        causes.append(Cause(fault, tuple(found), waits, unrecorded=unrecorded))
    return sorted(causes, key=lambda one: (one.unrecorded, -len(one.waits)))


def _missed_first(rank: int, waits: Sequence[Wait], picture: Picture) -> Wait:
    """Return that of the ops which wait for `rank` that it would have issued first.

    Ranks that run the same program count their ops alike: the op whose place is next
    after the rank's last one is the one. A send or receive has another place on its
    other side: it is the first one if there is a gap before all others.
    """
    following = picture.last_order(rank) + 1
    # The others wait for a rank that ended because of it.
    waits = [one for one in waits if rank in one.awaited] or waits

    def key(wait: Wait) -> tuple[int, int, int, int]:
        order = wait.op.order if wait.op is not None else 1 << 62
        if wait.is_p2p:
            return 1, 0, wait.seq, wait.rank
        gap = order - following
        return (0 if gap == 0 else 2), abs(gap), len(wait.group.ranks), wait.rank

    if following == 0:
        # Its records hold nothing: the waiting ranks' own order is all there is.
        # The other side of a send counts its ops otherwise.
        return min(waits, key=lambda wait: (wait.is_p2p, issue_order(wait), wait.rank))
    return min(waits, key=key)
