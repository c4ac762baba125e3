"""A service in a running job that is asked twice, and believed where both agree.

A job that runs is ahead here and there at any time: only what has not changed between
two reports can be why it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import psutil

from ..observe.evidence import Group, RankEvidence
from ..post_mortem.evidence_file import EvidenceFile
from ..post_mortem.flight_dump import Dump
from ..post_mortem.flight_rank import condense
from ..post_mortem.flight_recorder import evidence_of_dumps

__all__ = ["Found", "Reports", "found_in", "ports_of"]

#: Seconds between two reports.
BETWEEN = 2.0
_LISTENS = psutil.CONN_LISTEN
_GOES_ON = "ranks have issued ops between two reports: the job goes on"


@dataclass(frozen=True)
class Found:
    """What one report tells."""

    ranks: Sequence[RankEvidence] = ()
    groups: Collection[Group] = ()
    #: Equal in two reports of a job that stands still.
    progress: object = None
    #: Why the report cannot be used; empty: it can.
    problem: str = ""


class Reports:
    """Two reports of one service: the first is fetched at once."""

    def __init__(self, name: str, kind: str, fetch: Callable[[], Found]) -> None:
        self._name, self._kind, self._fetch = name, kind, fetch
        self._since = time.monotonic()
        self._first = fetch()

    def compare(self) -> tuple[Found, EvidenceFile]:
        """Fetch the second report, and return what both tell."""
        found = self._first
        if not found.problem:
            time.sleep(max(0.0, self._since + BETWEEN - time.monotonic()))
            found = self._fetch()
        if not found.problem and found.progress != self._first.progress:
            found = Found(problem=_GOES_ON)
        ranks = tuple(sorted({one.rank for one in found.ranks}))
        return found, EvidenceFile(self._name, self._kind, ranks, found.problem)


def found_in(dumps: Mapping[int, Dump]) -> Found:
    """Return what the Flight Recorder dumps of ranks tell; they lose their entries."""
    progress = {rank: _progress(dump) for rank, dump in dumps.items()}
    condensed = {rank: condense(dump) for rank, dump in dumps.items()}
    recorded, groups, _ = evidence_of_dumps(condensed)
    return Found(recorded, groups, progress)


def _progress(dump: Dump) -> object:
    """Return what changes whenever a rank issues an op or completes one."""
    states = [
        (one.record_id, one.kind.state, one.kind.retired) for one in dump.entries[-100:]
    ]
    return dict(dump.status), states


def ports_of(pid: int) -> frozenset[int]:
    """Return where a process, or its parent for it, listens for TCP, if it is known."""
    try:
        process = psutil.Process(pid)
        # Its name since psutil 6.
        read = getattr(process, "net_connections", None) or process.connections
        found = read("tcp")
    except psutil.Error:
        return frozenset()
    return frozenset(one.laddr.port for one in found if one.status == _LISTENS)
