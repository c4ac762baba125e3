"""Why a rank's library ended the process: its last op, beside those of the others.

gloo calls ``abort`` where the sizes of an op differ between ranks, and writes beside an
array where its dtype does. An abort is held up meanwhile
(`backends.hang_report.silent`), so that the rank has published its last records.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.groups.summary import GroupStatus, OpStatus
from rankscope.backends.observe.diagnosis import diagnose
from rankscope.backends.observe.verdicts import Fault, RankView, Verdict
from rankscope.backends.work.flight_recorder import SIZES_SHOWN

from ..wire.requests import GetFlightRecord
from .rank_registry import RankRegistry
from .rank_slots import RankSlot

__all__ = ["CRASHES", "causes_of_crash", "differences_between"]

#: What ends a process where a library gives up, or has written beside an array.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)

#: Records that are fetched from each rank, and seconds that they may take.
RECORDS = 200
ANSWER = 1.0

_P2P = ("send", "recv")
_UNLIKE = (
    *(Fault.OP_MISMATCH, Fault.ORDER_MISMATCH, Fault.ROOT_MISMATCH),
    *(Fault.REDUCE_OP_MISMATCH, Fault.DTYPE_MISMATCH, Fault.SIZE_MISMATCH),
    Fault.SPLIT_MISMATCH,
)


def causes_of_crash(registry: RankRegistry, slot: RankSlot) -> list[Verdict]:
    """Return how the op that a dead rank was in differs from that of the others."""
    last = _last_ops(slot)
    others = {rank for group, _ in last for rank in group.ranks} - {slot.rank}
    if not others:
        return []
    answers = registry.ask(GetFlightRecord(RECORDS), others, ANSWER)
    now_ns = time.time_ns()
    views = {
        rank: RankView(rank, records=dump["records"], now_ns=now_ns)
        for rank, dump in answers.results.items()
    }
    # The same op may have ended others of them too.
    for one in registry.slots:
        if one is slot or one.rank in others - views.keys():
            records = one.last_records or [
                _record(group, op, now_ns) for group, op in _last_ops(one)
            ]
            views[one.rank] = RankView(one.rank, records=records, now_ns=now_ns)
    groups = {group.key: group.generation for group, _ in last}
    return _differences(groups, views)


def differences_between(statuses: Mapping[int, GroupStatus]) -> list[Verdict]:
    """Return how the op in which a group was aborted differs between its ranks."""
    ops = {rank: group.started for rank, group in statuses.items()}
    group = next(iter(statuses.values()), None)
    if group is None or ops.keys() != set(group.ranks):
        return []
    now_ns = time.time_ns()
    views, places = {}, set()
    for rank, op in ops.items():
        if op is None or op.op in _P2P:
            return []
        places.add((op.seq, statuses[rank].generation))
        record = _record(statuses[rank], op, now_ns)
        views[rank] = RankView(rank, records=[record], now_ns=now_ns)
    if len(places) > 1:
        return []
    return _differences({group.key: group.generation}, views)


def _differences(
    groups: Mapping[GroupKey, int], views: Mapping[int, RankView]
) -> list[Verdict]:
    found = diagnose(groups, views, stall=0.0)
    return [one for one in found if one.fault in _UNLIKE]


def _last_ops(slot: RankSlot) -> list[tuple[GroupStatus, OpStatus]]:
    """Return the op of each group that the last status of a rank has.

    What an op has written beside its arrays may end the process after the op.
    """
    return [
        (group, op)
        for group in slot.summary.groups
        if (op := group.oldest or group.enqueued) and group.state == "ready"
    ]


def _record(group: GroupStatus, op: OpStatus, now_ns: int) -> dict[str, Any]:
    """Return the record of an op, as far as a status has it."""
    is_p2p = op.op in _P2P
    return {
        "group_id": group.key.id,
        "generation": group.generation,
        "op": op.op,
        "is_p2p": is_p2p,
        "collective_seq_id": 0 if is_p2p else op.seq or 0,
        "p2p_seq_id": op.seq or 0 if is_p2p else 0,
        "op_id": -1,
        "backend": group.backend,
        "state": "started",
        "peer": op.peer,
        # Of a longer list a status has the first ones.
        "sizes": op.sizes if len(op.sizes) < SIZES_SHOWN else (),
        "dtypes": op.dtypes,
        "frame": {"source": op.source},
        "time_created_ns": now_ns - int((op.elapsed or 0.0) * 1e9),
        "time_started_ns": 0,
        "time_ended_ns": 0,
    }
