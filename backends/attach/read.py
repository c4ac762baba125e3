"""Read where the processes of jobs are, and what else their jobs tell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..observe.evidence import RankEvidence, combine
from ..observe.root_cause import find_root_causes
from ..post_mortem.evidence_file import EvidenceFile
from ..post_mortem.ras_report import RasReader
from ..post_mortem.report import Report
from .debug_server import debug_reports
from .dump_trigger import dump_reports
from .jobs import FORKED, Job, Member
from .look import MOVES, STACKS, Look
from .nccl_ras import ras_reports
from .reports import Found, Reports
from .stacks import Stack, read_stacks, spawned_rank

__all__ = ["Source", "find_spawned", "look"]

#: Asks a service of a job; None: it has none.
Source = Callable[[Job], Reports | None]

#: Why counts of NCCL alone decide nothing.
_EQUAL = (
    "all ranks have launched as many ops: they compute, or the op that they are in "
    "hangs in a GPU or in the network"
)


def find_spawned(jobs: Iterable[Job], py_spy: str | None) -> list[Job]:
    """Return `jobs`, of forked ones the ranks that `torch.multiprocessing` started."""
    found = []
    for job in jobs:
        if job.launcher != FORKED:
            found.append(job)
            continue
        members = [
            Member(one.process, rank)
            for one in job.members
            if py_spy and (rank := spawned_rank(one.process, py_spy)) is not None
        ]
        if members:
            note = "ranks are the indexes that torch.multiprocessing gave"
            found.append(
                replace(
                    job,
                    launcher="torch.multiprocessing",
                    members=tuple(sorted(members, key=lambda one: one.rank or 0)),
                    notes=(note,),
                )
            )
    return found


def look(
    jobs: Sequence[Job],
    py_spy: str | None,
    told: Callable[[int], None] = lambda _: None,
    sources: Sequence[Source] = (),
) -> list[Look]:
    """Read the stacks of all processes of `jobs`, and return what they tell.

    `py_spy` is the program that `find_py_spy` has found, None: it is missing; `told` is
    called with the number of stacks that were read. `sources` ask what serves in a job,
    the best one first, beside torch's debug server, its dumps on demand and NCCL's RAS
    service.
    """

    def debug_or_dumps(job: Job) -> Reports | None:
        return (debug_reports(job, py_spy) if py_spy else None) or dump_reports(job)

    asked = (*sources, debug_or_dumps, ras_reports)
    reports = [[one for ask in asked if (one := ask(job)) is not None] for job in jobs]
    processes = [member.process for job in jobs for member in job.members]
    if py_spy is None:
        stacks = {one.pid: Stack(problem="py-spy is missing") for one in processes}
    else:
        stacks = read_stacks(processes, py_spy, told)
    return [
        _look(job, stacks, [one.compare() for one in its])
        for job, its in zip(jobs, reports, strict=True)
    ]


def _look(
    job: Job, stacks: Mapping[int, Stack], reports: Sequence[tuple[Found, EvidenceFile]]
) -> Look:
    own = {one.process.pid: stacks[one.process.pid] for one in job.members}
    found, files = [], []
    for member in job.members:
        if member.rank is None:
            continue
        stack = own[member.process.pid]
        name = f"rank {member.rank}, process {member.process.pid}"
        problem = stack.problem or (MOVES if stack.moves else "")
        files.append(EvidenceFile(name, STACKS, (member.rank,), problem))
        found.append(
            RankEvidence(
                member.rank,
                location=stack.line,
                called=stack.called,
                process=f"pid {member.process.pid} on {os.uname().nodename}",
                source=name,
            )
        )
    # A stack is of this very process: what it says counts.
    evidence = combine(
        [*found, *(rank for one, _ in reports for rank in one.ranks)],
        job.world_size,
        [group for one, _ in reports for group in one.groups],
    )
    verdicts = find_root_causes(evidence)
    told = [file for _, file in reports]
    if not verdicts and all(one.kind == RasReader.kind for one in told):
        # Of an op that all have launched, counts do not tell whether it is over.
        evidence = combine(found, job.world_size)
        told = [
            replace(one, problem=_EQUAL) if not one.problem else one for one in told
        ]
    return Look(job, own, Report(tuple(verdicts), (*files, *told), evidence))
