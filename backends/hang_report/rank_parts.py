"""What ranks that watch themselves for a hang tell of it: their records, on this host.

Those of a job to which nobody can attach, as its rank 0 has ended, or has never come,
tell it too; so do those on Rankscope's own groups.
"""

from __future__ import annotations

from functools import partial

from ..attach.jobs import Job
from ..attach.reports import Found, Reports
from ..post_mortem.report import examine
from .meeting import find_meeting
from .observer import parts_of

__all__ = ["rank_parts"]

KIND = "records of ranks"


def rank_parts(job: Job) -> Reports | None:
    """Ask the ranks of a job; None: they do not watch themselves."""
    key = find_meeting([one.process.pid for one in job.members])
    if key is None:
        return None
    return Reports("what the ranks record", KIND, partial(_fetch, key))


def _fetch(key: str) -> Found:
    try:
        with parts_of(key) as folder:
            evidence = examine([folder]).evidence
    except OSError as error:
        return Found(problem=f"the ranks were not asked: {error}")
    progress = {
        (one.rank, group): [(op.order, op.state) for op in known.ops if op.in_flight]
        for one in evidence.ranks.values()
        for group, known in one.groups.items()
    }
    return Found(tuple(evidence.ranks.values()), evidence.groups, progress)
