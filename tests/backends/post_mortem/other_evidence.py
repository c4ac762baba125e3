"""What a simulated job leaves beside dumps: a torchrun log, a report of NCCL's RAS.

They carry less than dumps: of a log's group not even who is in it, of RAS no sends and
no ops but by their number. A truth is asked for as far as they can tell it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

from tests.backends.nccl.ras_service import FINE, FUNCTIONS
from tests.backends.post_mortem.simulation import Issued, Simulation
from tests.backends.post_mortem.training_job import Group

__all__ = ["ras_report", "torchrun_log"]

_OP_TYPES = {
    "all_reduce": "ALLREDUCE",
    "_all_gather_base": "_ALLGATHER_BASE",
    "_reduce_scatter_base": "_REDUCE_SCATTER_BASE",
    "all_reduce_barrier": "BARRIER",
    "all_to_all": "ALLTOALL_BASE",
    "coalesced": "COALESCED",
}
_CALLS = {
    "all_reduce": "AllReduce",
    "all_reduce_barrier": "AllReduce",
    "_all_gather_base": "AllGather",
    "_reduce_scatter_base": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
}


def torchrun_log(run: Simulation, seed: int, dead: set[int]) -> bytes:
    """Return the watchdog's lines of all ranks that are not `dead`, as they mix.

    Each group's watchdog tells of its first op that is not over. A rank without one
    hears of the others' timeout by its default group.
    """
    draw = random.Random(seed)
    newest = draw.random() < 0.5
    parts = []
    for rank in range(len(run.programs)):
        if rank in dead:
            continue
        start = f"[rank{rank}]:[E1206 18:44:{draw.randrange(10, 59)}.715 X.cpp:632] "
        lines = []
        for number, group in enumerate(run.job.of(rank)):
            mine = [one for one in run.issued[rank] if one.op.group is group]
            late = [one for one in mine if not one.seen_complete]
            place = group.ranks.index(rank)
            name = f"[PG ID {number} PG GUID {group.name}({group.desc}) Rank {place}]"
            done = [one for one in mine if one.seen_complete]
            last, over = (_number(ones[-1]) if ones else -1 for ones in (mine, done))
            if late:
                lines += _timeout(late[0], place, name, last, over, newest)
            elif not number:
                lines.append(
                    f"{name} Received a dump signal due to a collective timeout from  "
                    "rank 0 and we will try our best to dump the debug info. Last "
                    f"enqueued NCCL work: {last}, last completed NCCL work: {over}."
                    "This is most likely caused by incorrect usages of collectives"
                )
        parts.append([start + line for line in lines])
    mixed = []
    while parts := [one for one in parts if one]:
        mixed.append(draw.choice(parts).pop(0))
    return ("\n".join(mixed) + "\n").encode()


def _timeout(
    one: Issued, place: int, name: str, last: int, over: int, newest: bool
) -> list[str]:
    kind = _OP_TYPES.get(one.op.name, one.op.name.upper())
    sizes, seq = one.op.sizes, _number(one)
    started = f"last started work: {over + 1} ({kind}), " if newest else ""
    return [
        f"[Rank {place}] Watchdog caught collective operation timeout: WorkNCCL("
        f"SeqNum={seq}, OpType={kind}, NumelIn={sizes[0][0]}, NumelOut={sizes[1][0]}, "
        "Timeout(ms)=600000) ran for 600061 milliseconds before timing out.",
        f"{name}  failure detected by watchdog at work sequence id: {seq} PG status: "
        f"last enqueued work: {last}, {started}last completed work: {over}",
    ]


def _number(one: Issued) -> int:
    return one.p2p_seq if one.op.parts else one.seq


def ras_report(run: Simulation, dead: set[int], pids: int = 4000) -> bytes:
    """Return RAS's JSON of all communicators; `dead` processes do not answer."""
    communicators = [_communicator(run, group, dead, pids) for group in run.job.groups]
    report = {
        "nccl_version": "2.28.9",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-01-01 00:00:00",
        "communicators_count": len(communicators),
        "communicators": communicators,
        "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
    }
    return json.dumps(report, indent=2).encode()


def _communicator(
    run: Simulation, group: Group, dead: set[int], pids: int
) -> dict[str, Any]:
    ranks, missing = [], []
    for place, rank in enumerate(group.ranks):
        process = {
            "rank": place,
            "host": f"10.0.0.{rank // 8}",
            "pid": pids + rank % 8,
            "cuda_dev": rank % 8,
            "nvml_dev": rank % 8,
        }
        if rank in dead:
            status = {"unresponsive": True, "considered_dead": True}
            missing.append({**process, "status": status})
            continue
        counts = Counter(
            _CALLS[one.op.name]
            for one in run.issued[rank]
            if one.op.group is group and one.op.name in _CALLS
        )
        counted = {name: counts[name] for name in FUNCTIONS}
        ranks.append({**process, "status": FINE, "collective_counts": counted})
    return {
        "hash": f"0x{group.uid + 0xAB:x}",
        "secondary_hash": "0x1:0x2",
        "size": len(group.ranks),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(missing),
        "ranks": ranks,
        "missing_ranks": missing,
    }
