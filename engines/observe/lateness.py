"""Who keeps the others waiting, by the flight records of running ranks."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from rankscope.backends.observe.late_findings import LateFinding
from rankscope.backends.observe.lateness import Lateness
from rankscope.backends.rank_sets import tell_ranks

from ..errors import ClusterError
from ..status import ClusterStatus
from .flight_records import TIMEOUT, FlightRecords
from .profiling import RATE, Profile, Sampled, Sampling, file_name, innermost_line
from .silence import responding

__all__ = ["Lateness", "Recorded", "located", "take", "watched"]

#: Records that are fetched of each rank, and of all ranks together.
LAST, IN_ALL, LEAST = 200, 12_800, 24
#: Seconds that a status waits for the records, and who asks about what is over.
ANSWER, ENDED_ANSWER = 0.5, TIMEOUT
#: Seconds for which late ranks are sampled to tell where they are meanwhile.
WATCHED = 1.0
#: Looks at a rank while the others wait for it that tell something: how many at least,
#: which part of those that were due, and which part of them has one line, or function.
LOOKS, SEEN, MOST = 5, 0.5, 0.6


class Recorded(Protocol):
    """The calls of `ObservedRanks` that are needed here."""

    def glance(self) -> ClusterStatus: ...

    def flight_records(
        self, ranks: Iterable[int], *, last: int | None = ..., timeout: float = ...
    ) -> FlightRecords: ...

    def start_sampling(self, ranks: Iterable[int], *, seconds: float) -> Sampling: ...


def take(
    cluster: Recorded,
    lateness: Lateness,
    *,
    last: int = LAST,
    since_ns: int = 0,
    timeout: float = TIMEOUT,
) -> FlightRecords:
    """Fetch the newest records of the ranks into `lateness`; return them."""
    status = cluster.glance()
    ranks = responding(status.ranks)
    if not ranks:
        return FlightRecords()
    records = cluster.flight_records(
        ranks, last=max(LEAST, min(last, IN_ALL // status.world_size)), timeout=timeout
    )
    ahead = {rank: since_ns + ns for rank, ns in records.offsets_ns.items()}
    hosts = {one.rank: one.host for one in status.ranks}
    lateness.take(records.dumps, hosts=hosts, since_ns=ahead if since_ns else {})
    return records


def watched(cluster: Recorded, lateness: Lateness) -> list[LateFinding]:
    """Return the findings, after late ranks were watched for a second if they run."""
    findings = lateness.findings()
    busy = {one.rank for one in cluster.glance().ranks if one.busy}
    ranks = sorted(busy & {rank for one in findings for rank in one.windows})
    if not ranks:
        return findings
    try:
        sampling = cluster.start_sampling(ranks, seconds=2 * WATCHED)
        threading.Event().wait(WATCHED)
        profile = sampling.take()
    except ClusterError:
        # They do not answer any more: where they are is not known.
        return findings
    take(cluster, lateness)
    return located(lateness.findings(), profile)


def located(findings: Iterable[LateFinding], profile: Profile) -> list[LateFinding]:
    """Return `findings` with where the late ranks were, as far as they were seen."""
    return [replace(one, meanwhile=_meanwhile(one, profile)) for one in findings]


def _meanwhile(finding: LateFinding, profile: Profile) -> str:
    there: dict[str, list[int]] = {}
    for rank, windows in finding.windows.items():
        place = _place(windows, profile.ranks.get(rank))
        if place:
            there.setdefault(place, []).append(rank)
    named = [tell_ranks(ranks, f"is at {place}") for place, ranks in there.items()]
    if len(named) == 1 and len(*there.values()) == len(finding.ranks):
        (place,) = there
        return f"{'it is' if len(finding.ranks) == 1 else 'they are'} at {place}"
    return ", ".join(named)


def _place(windows: Sequence[tuple[int, int]], sampled: Sampled | None) -> str:
    """Return the line, else the function, that a rank was at in `windows`."""
    if sampled is None or not sampled.course:
        return ""
    first, last = sampled.course[0][0], sampled.course[-1][0]
    inside = sorted(one for one in windows if first <= one[0] and one[1] <= last)
    begins = [begin for begin, _ in inside]
    lines, functions = Counter[str](), Counter[str]()
    looks = 0
    for at, stack in sampled.course:
        window = bisect_right(begins, at) - 1
        if window < 0 or at > inside[window][1]:
            continue
        looks += 1
        frame, _ = innermost_line(stack.frames)
        if frame is not None:
            file = file_name(frame)
            text = f": {frame.text}" if frame.text else ""
            lines[f"{file} line {frame.line}{text}"] += 1
            functions[f"{file} in {frame.function}"] += 1
    due = sum(end - begin for begin, end in inside) / 1e9 * RATE
    if looks >= max(LOOKS, SEEN * due):
        for found in (lines, functions):
            place, count = found.most_common(1)[0] if found else ("", 0)
            if count >= MOST * looks:
                return place
    return ""
