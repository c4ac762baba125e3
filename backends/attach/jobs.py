"""Which processes of a host are the ranks of a job: found in a table of processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from .launchers import Stated, module_of
from .process_table import Process

__all__ = [
    "ENGINES",
    "FORKED",
    "Job",
    "Member",
    "find_jobs",
    "jobs_of_user",
    "processes_named",
]

#: The launcher of processes that `multiprocessing` or a notebook has started: whether
#: they are ranks, their stacks tell.
FORKED = "multiprocessing"
#: The launcher of the engines of a notebook.
ENGINES = "ipyparallel"

_Table = Mapping[int, Process]


@dataclass(frozen=True)
class Member:
    """A process of a job."""

    process: Process
    #: None: neither its environment nor its launcher tells.
    rank: int | None = None


@dataclass(frozen=True)
class Job:
    """The processes that one launcher has started on this host."""

    #: ``torchrun``, ``mpiexec``, …; empty: not known.
    launcher: str
    #: What its ranks share: an address, the id of a run or of a step.
    id: str
    #: The process of the launcher; None: it is not on this host, or not known.
    pid: int | None
    world_size: int | None
    #: In the order of their ranks.
    members: tuple[Member, ...]
    #: The command line of its program.
    command: tuple[str, ...] = ()
    #: What is to be known about the search.
    notes: tuple[str, ...] = ()

    def keep(self, wanted: Callable[[Member], bool]) -> Job:
        return replace(self, members=tuple(filter(wanted, self.members)))


def ancestors(process: Process, table: _Table) -> Iterator[Process]:
    seen = {process.pid}
    while (above := table.get(process.parent)) is not None and above.pid not in seen:
        seen.add(above.pid)
        yield above
        process = above


def find_jobs(table: _Table) -> list[Job]:
    """Return the jobs among processes, the oldest first.

    The workers of a data loader inherit the environment of their rank: of processes
    with one rank below each other the outermost Python is the rank.
    """
    ranks: dict[tuple[object, ...], list[tuple[Process, Stated]]] = defaultdict(list)
    others: dict[tuple[str, int], list[Process]] = defaultdict(list)
    for process in table.values():
        stated = process.stated
        if not process.is_python:
            continue
        if stated is None:
            if (kind := _kind_of_child(process, table)) is not None:
                others[kind, process.parent].append(process)
        elif not any(
            one.is_python and one.stated == stated for one in ancestors(process, table)
        ):
            launcher = _launcher(process, table)
            by_process = launcher.pid if launcher is not None else process.parent
            ranks[stated.launcher, stated.job or by_process].append((process, stated))
    jobs = [_job(found, table) for found in ranks.values()]
    for (kind, parent), children in others.items():
        jobs.append(_unranked(kind, children, table.get(parent)))
    return sorted(jobs, key=lambda job: min(one.process.started for one in job.members))


def _launcher(process: Process, table: _Table) -> Process | None:
    """Return the launcher above a process: the outermost of those of one kind."""
    found: Process | None = None
    for one in ancestors(process, table):
        if one.launcher in ("", "wrapper"):
            continue
        if found is not None and one.launcher != found.launcher:
            break
        found = one
    return found


def _job(found: list[tuple[Process, Stated]], table: _Table) -> Job:
    members: dict[int, Process] = {}
    notes = []
    for process, stated in sorted(found, key=lambda one: (one[0].started, one[0].pid)):
        first = members.setdefault(stated.rank, process)
        if first is not process:
            notes.append(
                f"process {process.pid} says that it is rank {stated.rank}, as process "
                f"{first.pid} does, which is older: it is left out"
            )
    process, stated = found[0]
    launcher = _launcher(process, table)
    sizes = [stated.world_size for _, stated in found if stated.world_size is not None]
    return Job(
        (launcher.launcher if launcher is not None else "") or stated.launcher,
        _id(stated),
        None if launcher is None else launcher.pid,
        max(sizes, default=None),
        tuple(Member(one, rank) for rank, one in sorted(members.items())),
        members[min(members)].command,
        tuple(notes),
    )


def _id(stated: Stated) -> str:
    """Return ``127.0.0.1:29500``, ``1234.0``, or the name of a run."""
    values = [one for one in stated.job if one]
    if stated.launcher == "srun":
        return ".".join(values)
    if stated.launcher == "torchrun" and values[0] == "none":
        # That of each job which was given no id.
        values = values[1:]
    elif stated.launcher == "torchrun":
        values = values[:1]
    return ":".join(values)


def _kind_of_child(process: Process, table: _Table) -> str | None:
    """Return what a process without a rank may be a child of; None: of nothing."""
    if process.name == "ipengine" or module_of(process.command) == "ipyparallel.engine":
        return ENGINES
    parent = table.get(process.parent)
    if parent is None or not parent.is_python:
        return None
    spawned = "--multiprocessing-fork" in process.command
    forked = bool(process.command) and process.command == parent.command
    return FORKED if spawned or forked else None


def _unranked(kind: str, found: list[Process], parent: Process | None) -> Job:
    ordered = sorted(found, key=lambda one: (one.started, one.pid))
    # The command of a child is how its parent has started it.
    above = parent if kind == FORKED else None
    return Job(
        kind,
        "",
        parent.pid if parent is not None else None,
        None,
        tuple(map(Member, ordered)),
        above.command if above is not None else ordered[0].command,
    )


def jobs_of_user(table: _Table, user: int) -> list[Job]:
    """Return the jobs of a user, by number; of root (0) those of all users."""
    jobs = find_jobs(table)
    if user == 0:
        return jobs
    found = (job.keep(lambda one: one.process.user == user) for job in jobs)
    return [job for job in found if job.members]


def processes_named(
    pids: Iterable[int],
    table: _Table,
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


def _means(pid: int, member: Member, table: _Table) -> bool:
    """Return whether a pid is that of a process or, of no rank itself, one above it."""
    process = member.process
    if process.pid == pid:
        return True
    above = table.get(pid)
    if above is None or (above.stated is not None and above.is_python):
        return False
    return any(one.pid == pid for one in ancestors(process, table))
