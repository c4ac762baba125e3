"""Diagnosis: why ops hang, from what live ranks answered at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from ..groups.inquiry import ANSWER_WAIT, Answers, Explanation
from ..groups.key import GroupKey
from ..groups.spec import GroupSpec
from ..rank_sets import group_by, name_ranks, tell_ranks
from ..work.op_type import spec_of
from .evidence import Evidence
from .live_evidence import live_evidence
from .records import Record, sequence_number
from .root_cause import find_completed_differences, find_root_causes
from .root_cause.facts import deaths, exceptions, silences
from .verdicts import Fault, RankView, Verdict, in_one

__all__ = ["completed_unlike", "diagnose", "explain", "failed_last"]


def diagnose(
    groups: Mapping[GroupKey, int], views: Mapping[int, RankView], stall: float
) -> list[Verdict]:
    """Return why ops of `groups` do not complete; ``[]`` if there is no fault.

    Ops of other groups, and of other generations than these, are ignored. `views` is
    what each rank has answered. An op counts as stalled after `stall` seconds in
    flight; a rank that is dead or silent is reported at once, even if no other waits.
    """
    evidence = live_evidence(groups, views)
    found = find_root_causes(evidence, stall) if _stalls(evidence, stall) else []
    told = {rank for one in found for rank in one.culprits}
    members = {rank for key in groups for rank in key.ranks} - told
    rest = [one for rank, one in evidence.ranks.items() if rank in members]
    dead = [one.rank for one in rest if one.death is not None]
    silent = [one.rank for one in rest if one.silence is not None]
    found = [
        *_on_gone(Fault.RANK_DEAD, dead, deaths(dead, evidence), groups),
        *_on_gone(
            Fault.RANK_NOT_RESPONDING, silent, silences(silent, evidence), groups
        ),
        *found,
    ]
    found = [
        replace(
            one,
            certain=_is_certain(one, views),
            consequences=(
                *one.consequences,
                *exceptions(one.culprits, evidence, one.text),
                *_last_seen(one, views),
            ),
        )
        for one in found
    ]
    return _with_crash_causes(found, views)


def completed_unlike(
    groups: Mapping[GroupKey, int], views: Mapping[int, RankView]
) -> list[Verdict]:
    """Return verdicts on completed collectives whose dtype or reduction differed."""
    return find_completed_differences(live_evidence(groups, views))


def failed_last(
    groups: Mapping[GroupKey, int], views: Mapping[int, RankView]
) -> dict[GroupKey, str]:
    """Return the ops that failed and are the last ones of a rank, by group, as text.

    ``rank 0 in all_reduce #4 (train.py:7), rank 1 in barrier #4 (train.py:9)``
    """
    places = {(key.id, number): key for key, number in groups.items()}
    found: dict[GroupKey, dict[str, list[int]]] = {}
    for rank, view in sorted(views.items()):
        last: dict[GroupKey, Record] = {}
        for record in sorted(view.records, key=lambda one: one["time_created_ns"]):
            key = places.get((record["group_id"], record["generation"]))
            if key is not None:
                last[key] = record
        for key, record in last.items():
            if record["state"] in ("failed", "timed_out"):
                ops = found.setdefault(key, {})
                ops.setdefault(_with_line(record), []).append(rank)
    return {
        key: ", ".join(f"{name_ranks(ranks)} in {op}" for op, ranks in ops.items())
        for key, ops in found.items()
    }


def _with_line(record: Record) -> str:
    line = record["frame"]["source"]
    number = sequence_number(record)
    counted = f"{record['op']} #{number}" if number else record["op"]
    return f"{counted} ({line})" if line else counted


def _stalls(evidence: Evidence, stall: float) -> bool:
    """Return whether an op has been in flight for `stall` seconds.

    Where all ops are young, ranks that differ in one are about to be told so.
    """
    return any(
        op.in_flight
        and one.read_ns - (op.started_ns or op.created_ns or 0) >= stall * 1e9
        for one in evidence.ranks.values()
        if one.read_ns is not None
        for known in one.groups.values()
        for op in known.ops
    )


def _last_seen(verdict: Verdict, views: Mapping[int, RankView]) -> list[str]:
    if verdict.fault is not Fault.RANK_DEAD:
        return []
    ranks = [rank for rank in verdict.culprits if rank in views]
    places = group_by(ranks, lambda rank: views[rank].last_seen)
    return [
        tell_ranks(those, f"was last seen {place}")
        for place, those in places.items()
        if place
    ]


def _on_gone(
    fault: Fault, ranks: Sequence[int], text: str, groups: Iterable[GroupKey]
) -> list[Verdict]:
    """Return the verdict on ranks that are gone and for which nobody waits."""
    if not ranks:
        return []
    theirs = [key for key in groups if not set(key.ranks).isdisjoint(ranks)]
    first = max(theirs, key=lambda key: len(key.ranks))
    affected = tuple(sorted(theirs))
    return [Verdict(fault, first, tuple(ranks), (), "", 0, text, groups=affected)]


def _with_crash_causes(
    found: Sequence[Verdict], views: Mapping[int, RankView]
) -> list[Verdict]:
    """Return `found`, where a library ended ranks with what they issued unlike."""
    explained: list[Verdict] = []
    rest: list[Verdict] = []
    for one in found:
        causes: dict[tuple[Fault, GroupKey], Verdict] = {}
        ended = [rank for rank in one.culprits if _crash_causes(views, rank)]
        for rank in ended:
            for cause in _crash_causes(views, rank):
                # Of ranks that one op has ended, each may know as much as the others.
                causes.setdefault((cause.fault, cause.group), cause)
        if not ended or len(ended) < len(one.culprits):
            # The others died of something else.
            rest.append(one)
            explained += [replace(two, dead=tuple(ended)) for two in causes.values()]
        else:
            explained += [
                replace(
                    cause,
                    waiting=one.waiting,
                    consequences=(one.text, *one.consequences),
                    groups=tuple(dict.fromkeys((*one.groups, one.group))),
                    certain=True,
                    waits=one.waits,
                    dead=one.culprits,
                )
                for cause in causes.values()
            ]
    known = {(one.fault, one.group) for one in explained}
    return explained + [one for one in rest if (one.fault, one.group) not in known]


def _crash_causes(views: Mapping[int, RankView], rank: int) -> Sequence[Verdict]:
    return views[rank].crash_causes if rank in views else ()


def _is_certain(verdict: Verdict, views: Mapping[int, RankView]) -> bool:
    """Return whether it needs no second look: who is dead or stopped stays so."""
    if verdict.fault is Fault.RANK_NOT_RESPONDING:
        return all(views[rank].silence for rank in verdict.culprits)
    return verdict.fault is Fault.RANK_DEAD


#: With these, collectives of one number may be different ones.
_NEVER_MEET = (
    *(Fault.OP_MISMATCH, Fault.ORDER_MISMATCH, Fault.ROOT_MISMATCH),
    Fault.SIZE_MISMATCH,
)

_NO_ANSWER = (
    "the group is not made there yet, the process has ended, is stopped, overloaded or "
    "holds the GIL, or the host is out of reach"
)


def explain(spec: GroupSpec, generation: int, answers: Answers) -> Explanation | None:
    """Return why an op of the group did not end; ``None`` if no fault is found."""
    views = {}
    groups = {spec.key: generation}
    for place, answer in answers.items():
        rank = spec.ranks[place]
        if answer is None:
            views[rank] = RankView(rank, silent_for=ANSWER_WAIT, silence=_NO_ANSWER)
            continue
        members = answer.pop("groups")
        views[rank] = RankView(rank, **answer)
        for record in answer["records"]:
            key = GroupKey(record["group"], tuple(members[record["group_id"]]))
            if key != spec.key:
                groups[key] = max(groups.get(key, 0), record["generation"])
    verdicts = diagnose(groups, views, stall=0.0)
    # A rank that did not answer may have left: no cause where nobody waits for it.
    verdicts = [one for one in verdicts if one.op] or verdicts
    final = [one for one in verdicts if _is_final(one, spec, generation, views)]
    text, culprits = in_one(final or verdicts)
    silent = {Fault.RANK_NOT_RESPONDING} == {one.fault for one in verdicts}
    return Explanation(text, culprits, bool(final), silent) if text else None


def _is_final(
    verdict: Verdict, spec: GroupSpec, generation: int, views: Mapping[int, RankView]
) -> bool:
    """Return whether ranks have issued collectives of one number that never meet.

    Of one dtype those of other sizes do not. Other dtypes may fit by accident.
    """
    if verdict.fault not in _NEVER_MEET or verdict.group != spec.key:
        return False
    issued: dict[frozenset[tuple[str, int | None]], str] = {}
    for view in views.values():
        own = [
            one
            for one in view.records
            if one["group_id"] == spec.key.id
            and one["generation"] == generation
            and not one["is_p2p"]
            and sequence_number(one) == verdict.seq
        ]
        if own:
            kinds = frozenset((_kind(one["op"]), one["peer"]) for one in own)
            issued.setdefault(kinds, own[0]["backend"])
    pairs = combinations(issued, 2)
    # Backends of two devices count apart: each may have its ops in one order.
    return len(set(issued.values())) == 1 and (
        verdict.fault is Fault.SIZE_MISMATCH
        or any(one.isdisjoint(other) for one, other in pairs)
    )


def _kind(op: str) -> str:
    """Return what an op becomes on a backend that lacks it: they may meet."""
    while spec_of(op).fallback:
        op = spec_of(op).fallback
    return op
