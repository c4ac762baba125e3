"""What NCCL's RAS service tells of a running job: the ops that ranks have launched."""

from __future__ import annotations

from functools import partial

from ..errors import LibraryFailure
from ..nccl.ras import address, fetch
from ..observe.evidence import RankEvidence
from ..post_mortem.evidence_file import RawFile, UnreadableError
from ..post_mortem.ras_report import RasReader
from .jobs import Job
from .reports import Found, Reports, ports_of

__all__ = ["ras_reports"]

#: Seconds for a report.
TIMEOUT = 5.0


def ras_reports(job: Job) -> Reports | None:
    """Ask the service of a job; None: no rank of it listens at the service's port."""
    for member in job.members:
        try:
            _, port = address(member.process.variables)
        except LibraryFailure:
            continue
        if port in ports_of(member.process.pid):
            # It is on this host, whatever its variable says.
            fetched = partial(_fetch, job, ("localhost", port))
            return Reports(f"NCCL RAS at port {port}", RasReader.kind, fetched)
    return None


def _fetch(job: Job, where: tuple[str, int]) -> Found:
    try:
        text = fetch(where, TIMEOUT)
        ranks = RasReader().read(RawFile("NCCL RAS", text.encode()))
    except (LibraryFailure, UnreadableError) as error:
        return Found(problem=str(error))
    if not _is_of(job, ranks):
        return Found(problem="its ranks are not those of this job")
    launched = {
        one.rank: [known.progress.enqueued for known in one.groups.values()]
        for one in ranks
    }
    return Found(ranks, progress=launched)


def _is_of(job: Job, found: list[RankEvidence]) -> bool:
    """Return whether the ranks of a report are those of the job's processes."""
    ours = {one.process.pid: one.rank for one in job.members}
    both = [(one.rank, ours[pid]) for one in found if (pid := one.pid) in ours]
    return bool(both) and all(rank == other for rank, other in both)
