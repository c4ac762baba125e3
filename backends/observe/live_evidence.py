"""Evidence of live ranks: what they answered at one moment."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from ..groups.inquiry import IN_NO_CELL
from ..groups.key import GroupKey
from ..work.op_type import spec_of
from .evidence import (
    Arrays,
    Evidence,
    Group,
    GroupEvidence,
    IssuedOp,
    RankEvidence,
    SourceLine,
    State,
    combine,
)
from .records import Record, common_numbers, sequence_number, splits_of, tag_of
from .verdicts import RankView

__all__ = ["live_evidence"]

_STATES: tuple[State, ...] = ("scheduled", "started", "completed")
_UNEXPLAINED = (
    "its process is stopped or holds the GIL, e.g. inside a CUDA call, or its host is "
    "out of reach"
)


def live_evidence(
    groups: Mapping[GroupKey, int], views: Mapping[int, RankView]
) -> Evidence:
    """Return what `views`, the answers of ranks, tell of the generations of `groups`.

    Others are left out. Of a rank of a group without a view nothing is known, and
    neither of one that is silent; a dead one issues nothing more.
    """
    known = {
        (key.id, generation): (key, Group(key.name, key.ranks, key.id))
        for key, generation in groups.items()
    }
    now = time.time()
    evidence = combine(
        (_of_rank(view, known, now) for view in views.values()),
        groups=[group for _, group in known.values()],
    )
    return Evidence(evidence.ranks, evidence.groups, at_one_moment=True)


_Known = Mapping[tuple[str, int], tuple[GroupKey, Group]]


def _of_rank(view: RankView, known: _Known, now: float) -> RankEvidence:
    silence = None
    if view.death is None and view.silent_for is not None:
        why = view.silence or _UNEXPLAINED
        # The verdict may be read, on a board or in a log, long after this moment.
        since = time.strftime("%H:%M:%S", time.localtime(now - view.silent_for))
        silence = f"has not answered since {since}: {why}"
    answered = view.death is None and silence is None and view.recorded
    # Those of our own groups and of watched ones come one after the other.
    records = sorted(view.records, key=lambda one: one["time_created_ns"])
    found: dict[tuple[str, int], list[tuple[int, Record]]] = {}
    for order, record in enumerate(records):
        place = record["group_id"], record["generation"]
        if place in known:
            found.setdefault(place, []).append((order, record))
    return RankEvidence(
        view.rank,
        {
            group: _of_group(found.get(place, ()), key)
            for place, (key, group) in known.items()
            if view.rank in key.ranks and answered
        },
        recorded=answered,
        location=SourceLine.of(view.location),
        called=view.called or None,
        exception=view.exception or None,
        exception_line=SourceLine.of(view.exception_line),
        thread_exception=view.thread_exception or None,
        death=view.death,
        silence=silence,
        last_cell_exit=view.last_cell_exit or IN_NO_CELL,
        failed_in=_failed_in(view, found, known),
        process=view.process or None,
        read_ns=view.now_ns,
    )


def _failed_in(
    view: RankView,
    found: Mapping[tuple[str, int], Sequence[tuple[int, Record]]],
    known: _Known,
) -> Group | None:
    """Return the group whose op has ended the last cell of a rank, if it is known."""
    if view.last_cell_op is None:
        return None
    name, op, number = view.last_cell_op
    if number:
        # Not only the last one: it may have been waited for when others were issued.
        wanted = name, op, number
        groups = [
            known[place][1]
            for place, ops in found.items()
            if any((o["group"], o["op"], sequence_number(o)) == wanted for _, o in ops)
        ]
    else:
        named = (group for key, group in known.values() if key.name == name)
        groups = [one for one in named if view.rank in one.ranks]
    return groups[0] if len(groups) == 1 else None


def _of_group(records: Sequence[tuple[int, Record]], key: GroupKey) -> GroupEvidence:
    numbers = common_numbers(record for _, record in records)
    ops = tuple(
        _op(record, key.ranks, order, number)
        for (order, record), number in zip(records, numbers, strict=True)
    )
    return GroupEvidence(
        ops,
        lists_all_in_flight=True,
        lists_all=_is_whole(op.seq for op in ops if not op.is_p2p)
        and _is_whole(op.seq for op in ops if op.is_p2p),
    )


def _is_whole(numbers: Iterable[int]) -> bool:
    """Return whether no number from 1 to the last one is missing."""
    found = set(numbers)
    return len(found) == max(found, default=0)


def _op(record: Record, ranks: Sequence[int], order: int, number: int) -> IssuedOp:
    is_p2p, state = record["is_p2p"], record["state"]
    peer = None if record["peer"] is None else ranks[record["peer"]]
    return IssuedOp(
        record["op"],
        number,
        order,
        state if state in _STATES else "started",
        retired=state not in ("scheduled", "started"),
        is_p2p=is_p2p,
        peer=peer if is_p2p else None,
        arrays=_arrays(record),
        root=None if is_p2p else peer,
        reduce_op=record.get("reduce_op"),
        tag=tag_of(record) if is_p2p else None,
        line=_line(record),
        created_ns=record["time_created_ns"] or None,
        started_ns=record["time_started_ns"] or None,
        ended_ns=record["time_ended_ns"] or None,
        shown=sequence_number(record),
        counted=not record.get("uncounted_id"),
        equal_sizes=_equal_sizes(record),
        splits=splits_of(record, len(ranks)),
    )


def _line(record: Record) -> SourceLine | None:
    line = SourceLine.of(record["frame"]["source"])
    called = (SourceLine.of(one["source"]) for one in record.get("callers", ()))
    return line and line._replace(callers=tuple(one for one in called if one))


def _arrays(record: Record) -> Arrays:
    """Return the size of a message, and the dtype of any op."""
    size = None
    if record["is_p2p"] and record["sizes"]:
        size = (tuple(record["sizes"][0]),)
    dtypes = tuple(record["dtypes"][:1]) or None
    return Arrays(size, size, dtypes, dtypes)


def _equal_sizes(record: Record) -> tuple[int, ...] | None:
    places = spec_of(record["op"]).same_sizes
    if places is None:
        return None
    return tuple(map(prod, record["sizes"][places])) or None
