"""The ops of a dead job as a Chrome trace, for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from ..observe.chrome_trace import labels_of, rank_events, trace_head
from ..observe.evidence import Evidence, Group, IssuedOp, RankEvidence

__all__ = ["trace"]

#: Nanoseconds by which clocks of hosts that are set alike may differ.
_ALIKE = 20_000_000


def trace(evidence: Evidence) -> Iterator[str]:
    """Give the Chrome trace of the ops whose times are known, piece by piece.

    Clocks of hosts may differ by minutes. All ranks end a collective at about the same
    time: the clock of a rank is moved by the median difference to the first rank.
    """
    ids = {group: f"{number}" for number, group in enumerate(evidence.groups)}
    created = {
        rank: times
        for rank, one in evidence.ranks.items()
        if (times := [op.created_ns for op in _ops(one) if op.created_ns is not None])
    }
    offsets = _offsets([evidence.ranks[rank] for rank in created], ids)
    origin = min((min(created[rank]) - offsets[rank] for rank in created), default=0)
    yield json.dumps(trace_head(origin, offsets))[:-1] + ', "traceEvents": ['
    labels = labels_of(
        (_id(group, ids[group]), group.name)
        for one in evidence.ranks.values()
        for group, known in one.groups.items()
        if any(op.created_ns is not None for op in known.ops)
    )
    separator = ""
    for rank in sorted(created):
        records = _records(evidence.ranks[rank], ids)
        events = rank_events(rank, records, origin + offsets[rank], labels)
        yield separator + json.dumps([*events])[1:-1]
        separator = ",\n"
    yield "]}\n"


def _offsets(ranks: Iterable[RankEvidence], ids: Mapping[Group, str]) -> dict[int, int]:
    offsets: dict[int, int] = {}
    reference: dict[tuple[str, int], int] = {}
    for one in ranks:
        ends = _ends(one, ids)
        common = [ends[key] - reference[key] for key in ends.keys() & reference.keys()]
        offset = int(median(common)) if common else 0
        offsets[one.rank] = offset if abs(offset) > _ALIKE else 0
        for key, end in ends.items():
            reference.setdefault(key, end - offsets[one.rank])
    return offsets


def _ends(one: RankEvidence, ids: Mapping[Group, str]) -> dict[tuple[str, int], int]:
    # By the number of the group: its ranks would be hashed with each op.
    return {
        (number, op.seq): op.ended_ns
        for group, known in one.groups.items()
        for number in (ids[group],)
        for op in known.ops
        if op.ended_ns is not None and op.state == "completed" and not op.is_p2p
    }


def _ops(one: RankEvidence) -> Iterator[IssuedOp]:
    return (op for known in one.groups.values() for op in known.ops)


def _id(group: Group, number: str) -> str:
    return f"{group.name} ({number})"


def _records(one: RankEvidence, ids: Mapping[Group, str]) -> list[dict[str, Any]]:
    """Return the ops of a rank in the form of `Record.as_dict`, oldest first."""
    found = [
        (op.order, place, _record(op, group, ids[group]))
        for place, (group, known) in enumerate(one.groups.items())
        for op in known.ops
        if op.created_ns is not None
    ]
    return [record for *_, record in sorted(found, key=lambda entry: entry[:2])]


def _record(op: IssuedOp, group: Group, number: str) -> dict[str, Any]:
    arrays = op.arrays
    return {
        "group": group.name,
        "group_id": _id(group, number),
        "generation": 0,
        "backend": None,
        "op": op.op,
        "op_id": op.order,
        "is_p2p": op.is_p2p,
        "collective_seq_id": 0 if op.is_p2p else op.seq,
        "p2p_seq_id": op.seq if op.is_p2p else 0,
        "state": "completed" if op.retired else op.state,
        "time_created_ns": op.created_ns,
        "time_started_ns": op.started_ns or 0,
        "time_ended_ns": op.ended_ns or 0,
        "sizes": arrays.inputs or arrays.outputs,
        "dtypes": arrays.input_dtypes or arrays.output_dtypes,
        "peer": op.peer,
        "timeout": op.timeout,
        "frame": {"source": "" if op.line is None else str(op.line)},
        "error": None,
    }
