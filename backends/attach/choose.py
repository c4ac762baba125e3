"""Which processes are meant: by their pids, or all jobs of a user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .jobs import Job, Member, ancestors, find_jobs
from .launchers import module_of
from .process_table import Process

__all__ = ["jobs_of_user", "processes_named"]


def jobs_of_user(table: Mapping[int, Process], user: int) -> list[Job]:
    """Return the jobs of a user, by number; of root (0) those of all users."""
    jobs = find_jobs(table)
    if user == 0:
        return jobs
    found = (job.keep(lambda one: one.process.user == user) for job in jobs)
    return [job for job in found if job.members]


def processes_named(
    pids: Iterable[int],
    table: Mapping[int, Process],
    confirmed: Callable[[list[Job]], list[Job]],
) -> tuple[list[Job], list[str]]:
    """Return what `pids` name, job by job, and what is wrong with the others.

    The pid of a launcher, or of a shell that has started one, names its ranks. `table`
    has all processes; `confirmed` returns those jobs that are some: see `find_spawned`.
    """
    named = dict.fromkeys(pids)
    found = (
        job.keep(lambda one: any(_means(pid, one, table) for pid in named))
        for job in find_jobs(table)
    )
    jobs = confirmed([job for job in found if job.members])
    members = [one for job in jobs for one in job.members]
    alone: list[Process] = []
    problems = []
    for pid in named:
        process = table.get(pid)
        if process is None:
            problems.append(f"there is no process {pid}")
        elif any(_means(pid, one, table) for one in members):
            continue
        elif process.is_python:
            alone.append(process)
        elif process.launcher:
            problems.append(
                f"process {pid} ({process.launcher}) has started no Python on this host"
            )
        else:
            name = module_of(process.command) or process.name or "its name is not known"
            problems.append(f"process {pid} ({name}) is no Python")
    if alone:
        rest = tuple(map(Member, alone))
        jobs = [*jobs, Job("", "", None, None, rest, alone[0].command)]
    return jobs, problems


def _means(pid: int, member: Member, table: Mapping[int, Process]) -> bool:
    """Return whether a pid is that of a process or, of no rank itself, one above it."""
    process = member.process
    if process.pid == pid:
        return True
    above = table.get(pid)
    if above is None or (above.stated is not None and above.is_python):
        return False
    return any(one.pid == pid for one in ancestors(process, table))
