"""What NCCL's RAS service tells of a running job: how many ops each rank has launched.

It is asked twice. A job that runs is ahead here and there at any time: only what has
not changed between two reports can be why it hangs.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

import psutil

from ..errors import LibraryFailure
from ..nccl.ras import address, fetch
from ..observe.evidence import RankEvidence
from ..post_mortem.evidence_file import EvidenceFile, RawFile, UnreadableError
from ..post_mortem.ras_report import RasReader
from .jobs import Job

__all__ = ["RasReports", "listeners"]

#: Seconds between two reports, and for one of them.
BETWEEN, TIMEOUT = 2.0, 5.0

_Listeners = Mapping[int, frozenset[int]]


def listeners() -> dict[int, frozenset[int]]:
    """Return port → the processes that listen there for TCP connections."""
    found: dict[int, frozenset[int]] = {}
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return found
    for one in connections:
        if one.status == psutil.CONN_LISTEN and one.pid is not None:
            port = one.laddr.port
            found[port] = found.get(port, frozenset()) | {one.pid}
    return found


class RasReports:
    """The two reports of one job; the first is fetched at once.

    Nothing is asked where no rank of the job listens at the port of the service.
    """

    def __init__(self, job: Job, listening: _Listeners) -> None:
        self._job = job
        self._pids = {one.process.pid: one.rank for one in job.members}
        self._where = _service(job, listening)
        self._since = time.monotonic()
        self._first = self._fetch()

    def evidence(self) -> tuple[list[RankEvidence], EvidenceFile | None]:
        """Fetch the second report, and return what both tell; None: nothing listens."""
        if self._where is None:
            return [], None
        time.sleep(max(0.0, self._since + BETWEEN - time.monotonic()))
        found, problem = self._compare(self._fetch())
        ranks = tuple(one.rank for one in found)
        name = f"NCCL RAS at port {self._where[1]}"
        return found, EvidenceFile(name, RasReader.kind, ranks, problem)

    def _compare(
        self, second: list[RankEvidence] | str
    ) -> tuple[list[RankEvidence], str]:
        if isinstance(self._first, str):
            return [], self._first
        if isinstance(second, str):
            return [], second
        if not self._is_ours(second):
            return [], "its ranks are not those of this job"
        if _launched(self._first) != _launched(second):
            return [], "ranks have launched ops between two reports: the job goes on"
        return second, ""

    def _fetch(self) -> list[RankEvidence] | str:
        if self._where is None:
            return []
        try:
            text = fetch(self._where, TIMEOUT)
            return RasReader().read(RawFile("NCCL RAS", text.encode()))
        except (LibraryFailure, UnreadableError) as error:
            return str(error)

    def _is_ours(self, found: list[RankEvidence]) -> bool:
        """Return whether the ranks of the report are those of the job's processes."""
        both = [
            (one.rank, self._pids[pid])
            for one in found
            if one.process is not None
            and (pid := int(one.process.removeprefix("pid "))) in self._pids
        ]
        return bool(both) and all(theirs == ours for theirs, ours in both)


def _service(job: Job, listening: _Listeners) -> tuple[str, int] | None:
    """Return the address at which a rank of the job serves reports."""
    for member in job.members:
        try:
            _, port = address(member.process.variables)
        except LibraryFailure:
            continue
        if member.process.pid in listening.get(port, ()):
            # It listens on this host, whatever its variable says.
            return socket.gethostbyname("localhost"), port
    return None


def _launched(found: list[RankEvidence]) -> dict[int, list[int | None]]:
    return {
        one.rank: [known.progress.enqueued for known in one.groups.values()]
        for one in found
    }
