"""Which processes are meant: by their pids, or all jobs of a user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    pids: Iterable[int], table: Mapping[int, Process]
) -> tuple[list[Job], list[str]]:
    """Return what `pids` name, job by job, and what is wrong with the others.

    The pid of a launcher, or of a shell that has started one, names its ranks.
    """
    jobs = find_jobs(table)
    wanted: set[int] = set()
    alone: list[Process] = []
    problems = []
    for pid in dict.fromkeys(pids):
        process = table.get(pid)
        if process is None:
            problems.append(f"there is no process {pid}")
            continue
        meant = {
            one.process.pid
            for job in jobs
            for one in job.members
            if pid == one.process.pid
        } or {
            one.process.pid
            for job in jobs
            for one in job.members
            if any(above.pid == pid for above in ancestors(one.process, table))
        }
        wanted |= meant
        if meant:
            continue
        if process.is_python:
            alone.append(process)
        elif process.launcher:
            problems.append(
                f"process {pid} ({process.launcher}) has started no Python on this host"
            )
        else:
            name = module_of(process.command) or process.name or "its name is not known"
            problems.append(f"process {pid} ({name}) is no Python")
    found = [job.keep(lambda one: one.process.pid in wanted) for job in jobs]
    named = [job for job in found if job.members]
    if alone:
        members = tuple(map(Member, alone))
        named.append(Job("", "", None, None, members, alone[0].command))
    return named, problems
