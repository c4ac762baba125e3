"""What a job that ends well says of its last ops: who kept the others waiting.

Each rank leaves what tells of them where the ranks of its host meet; who finds that no
other one is left to come tells. Nobody waits: a rank that died leaves nothing, and is
not waited for.

Of ranks on several hosts the store of the job has it, once, and nothing before: each
leaves its last ops there, a few KB, and the one that comes last reads those of all.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

from ..groups.world import world
from ..observe.export import local_dump
from ..observe.joint_ops import share_of, slim
from ..observe.late_findings import late_lines
from ..observe.lateness import Lateness
from .meeting import Meeting

__all__ = [
    "LAST_OVER_HOSTS",
    "SERVER_WAIT",
    "KeyValues",
    "OverHosts",
    "last_line",
    "last_ops",
    "tells",
]

#: The newest records that a rank leaves for those of its host, and in the store for
#: those of others: fewer where there are many ranks.
LAST, LAST_OVER_HOSTS = 600, 120
_LEFT, _TOLD = "last_ops", "last_line"
#: Seconds that a rank which serves the store waits for the others to come.
SERVER_WAIT = 1.0

_KEY = "rankscope/last_ops"


def last_ops(last: int = LAST) -> dict[str, Any]:
    """Return groups and records of the last ops, those of destroyed groups, too."""
    groups: dict[str, Any] = {}
    records: list[Mapping[str, Any]] = []
    for source in world.sources:
        groups.update(source.past.get("groups", {}))
        records += source.past.get("records", ())
    try:
        mine = local_dump(last)
    except ValueError:
        # It is in no group of ours, and was in none.
        pass
    else:
        groups.update(mine["groups"])
        records += map(slim, mine["records"])
    records.sort(key=lambda one: int(one["time_created_ns"]))
    return {"groups": groups, "records": records[-last:]}


def last_line(meeting: Meeting, ops: Mapping[str, Any] | None = None) -> str:
    """Leave the last ops of this rank; return what those of all ranks of the host tell.

    Empty where nothing is certain, or other ranks are yet to leave theirs. `ops` is
    what it leaves, if not `last_ops`.
    """
    ranks = [*meeting.known()]
    if len(ranks) < 2:
        return ""
    mine = ops or last_ops(share_of(len(ranks), LAST))
    meeting.put(f"{_LEFT}_{meeting.rank}", dict(mine))
    found = {rank: meeting.get(f"{_LEFT}_{rank}") for rank in ranks}
    left = {rank: one for rank, one in found.items() if one is not None}
    if any(meeting.lives(rank) for rank in ranks if rank not in left):
        return ""
    # Two that come at the same time both find all of them.
    return sentence_of(left) if tells(meeting) else ""


def tells(meeting: Meeting) -> bool:
    """Whether this rank says the last line: no other one of its host has come to it."""
    return meeting.put(_TOLD, {})


def sentence_of(
    left: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str] = {}
) -> str:
    """Return what the last ops of ranks on `hosts` tell; empty: nothing is certain."""
    lateness = Lateness(ended=True)
    lateness.take(left, hosts=hosts)
    return next(iter(late_lines(lateness.findings())), "")


# -- ranks on several hosts ------------------------------------------------------------


class KeyValues(Protocol):
    """What a store of ours and one of torch have in common."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


class OverHosts:
    """What this rank has found as it left its groups."""

    def __init__(self) -> None:
        #: Whether its ops came to the others.
        self.has_left = False
        #: Who kept the others waiting; empty: nobody for sure, or another rank tells.
        self.line = ""
        #: Why they did not; empty where they did, or nothing was to be left.
        self.unknown = ""

    def leave(
        self,
        store: KeyValues,
        rank: int,
        size: int,
        host: str,
        ops: Mapping[str, Any],
        *,
        serves: bool,
    ) -> None:
        """Leave the last ops of this rank; read those of all, if it comes last.

        `ops` has ``groups`` and ``records`` as `last_ops` returns them. With `serves`
        the store ends with this rank, which waits for the others for `SERVER_WAIT`
        seconds. Raises what `store` raises.
        """
        # A process may make groups once more over the same store.
        key = f"{_KEY}/{store.add(f'{_KEY}/{rank}', 1)}"
        last = share_of(size, LAST_OVER_HOSTS)
        left = {**ops, "records": ops["records"][-last:], "host": host}
        store.set(f"{key}/{rank}", zlib.compress(json.dumps(left).encode(), 9))
        is_last = store.add(f"{key}/count", 1) == size
        self.has_left = True
        if is_last:
            found = {
                one: json.loads(zlib.decompress(store.get(f"{key}/{one}")))
                for one in range(size)
            }
            hosts = {one: told["host"] for one, told in found.items()}
            self.line = sentence_of(found, hosts)
            store.set(f"{key}/read", "1")
        elif serves:
            deadline = time.monotonic() + SERVER_WAIT
            while not store.check([f"{key}/read"]) and time.monotonic() < deadline:
                time.sleep(0.01)
