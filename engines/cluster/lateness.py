"""Who keeps the others waiting, by the flight records of running ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rankscope.backends.observe.lateness import LateFinding, Lateness

from ..status import ClusterStatus
from .flight_records import TIMEOUT, FlightRecords

__all__ = ["Lateness", "Recorded", "late_lines", "responding", "take"]

#: Records that are fetched of each rank, and of all ranks together.
LAST, IN_ALL, LEAST = 200, 12_800, 24
#: Seconds without a summary after which a rank is not asked: it would not answer.
QUIET = 2.0
#: Seconds that a status waits for the records.
ANSWER = 0.5


class Recorded(Protocol):
    """The calls of a cluster that are needed here."""

    def glance(self) -> ClusterStatus:
        """Return the last known status without a request."""

    def flight_records(
        self, ranks: Iterable[int], *, last: int | None = ..., timeout: float = ...
    ) -> FlightRecords:
        """Return the flight recorders of some ranks."""


def responding(status: ClusterStatus) -> list[int]:
    """Return the ranks that answer a request, by their last summaries."""
    return [
        one.rank
        for one in status.ranks
        if one.alive and one.heartbeat_age is not None and one.heartbeat_age <= QUIET
    ]


def take(
    cluster: Recorded,
    lateness: Lateness,
    *,
    last: int = LAST,
    since_ns: int = 0,
    timeout: float = TIMEOUT,
) -> FlightRecords:
    """Fetch the newest records of the ranks into `lateness`; return them.

    Ops that a rank entered before `since_ns`, on the clock of this process, are left
    out.
    """
    status = cluster.glance()
    ranks = responding(status)
    if not ranks:
        return FlightRecords()
    records = cluster.flight_records(
        ranks,
        last=max(LEAST, min(last, IN_ALL // status.world_size)),
        timeout=timeout,
    )
    ahead = {rank: since_ns + ns for rank, ns in records.offsets_ns.items()}
    hosts = {one.rank: one.host for one in status.ranks}
    lateness.take(records.dumps, hosts=hosts, since_ns=ahead if since_ns else {})
    return records


def late_lines(findings: Iterable[LateFinding]) -> list[str]:
    """Return a line for each finding: ``late rank: rank 2 is last to enter …``."""
    return [f"{one.pattern.value}: {one}" for one in findings]
