"""``rankscope diagnose --pid PID`` and ``--jobs``: look at what was not prepared.

It needs nothing of what the commands for running clusters import.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rankscope.backends.attach.jobs import (
    ENGINES,
    Job,
    jobs_of_user,
    processes_named,
)
from rankscope.backends.attach.look import Look, as_json
from rankscope.backends.attach.process_table import read_table
from rankscope.backends.attach.py_spy import PySpyError, find_py_spy
from rankscope.backends.attach.read import find_spawned, look
from rankscope.backends.hang_report.rank_parts import rank_parts
from rankscope.command_output import DONE, FAILED, HANGS, fail, say
from rankscope.widgets.report.page import write_page

__all__ = ["run", "run_watched", "watched_jobs"]

#: What the command of a rank has that a watched script was started by.
_WATCHED = "rankscope.torch"

#: The exit status of a program that SIGINT ends.
INTERRUPTED = 130


def run(values: argparse.Namespace) -> int:
    """Diagnose processes that run; return the exit status."""
    if (wrong := _wrong(values)) is not None:
        return fail("diagnose", wrong)
    try:
        return _run(values)
    except OSError as error:
        return fail("diagnose", error)
    except KeyboardInterrupt:
        fail("diagnose", "interrupted")
        return INTERRUPTED


def watched_jobs() -> list[Job]:
    """Return the jobs of this user that ``rankscope.torch`` watches.

    Of those that nobody can attach to, the ranks have not met yet, or rank 0, which
    serves the others' answers, has ended.
    """
    jobs = jobs_of_user(read_table(), os.geteuid())
    return [job for job in jobs if _is_watched(job)]


def run_watched(jobs: Sequence[Job], values: argparse.Namespace) -> int:
    return _tell(jobs, [], values, _py_spy())


def _is_watched(job: Job) -> bool:
    return any(_WATCHED in one.process.command for one in job.members)


def _wrong(values: argparse.Namespace) -> str | None:
    """Return what is wrong with a combination of options."""
    option = "--jobs" if values.jobs else "--pid"
    if values.jobs and values.pid:
        return "--jobs looks at all jobs, and --pid at those of a process: name one"
    if values.paths:
        return f"{option} looks at what runs: it takes no CLUSTER and no PATH"
    if values.trace is not None:
        return f"--trace is for a PATH, not for {option}: stacks have no times of ops"
    return None


def _run(values: argparse.Namespace) -> int:
    table = read_table()
    py_spy = _py_spy()
    problems: list[str] = []
    if values.jobs:
        jobs = find_spawned(jobs_of_user(table, os.geteuid()), py_spy)
    else:
        jobs, problems = processes_named(
            values.pid, table, lambda found: find_spawned(found, py_spy)
        )
    return _tell(jobs, problems, values, py_spy)


def _py_spy() -> str | None:
    try:
        return find_py_spy()
    except PySpyError as error:
        # The jobs, and what NCCL tells of them, are of use without stacks.
        fail("diagnose", error)
        return None


def _tell(
    jobs: Sequence[Job],
    problems: Sequence[str],
    values: argparse.Namespace,
    py_spy: str | None,
) -> int:
    count = sum(len(job.members) for job in jobs)
    looks = look(jobs, py_spy, _Progress(count), [rank_parts])
    if values.html is not None and looks:
        if len(looks) != 1:
            jobs = [one.job for one in looks]
            pids = [str(one.pid or one.members[0].process.pid) for one in jobs]
            return fail(
                "diagnose",
                f"--html writes a page for one job, and {len(looks)} were found: name "
                f"one by --pid ({', '.join(pids)})",
            )
        write_page(looks[0].report, looks[0].title, values.html)
        say(f"{values.html} written, for browser", file=sys.stderr)
    if values.json:
        print(as_json(looks, problems))
    else:
        for one in looks:
            say(one.as_text())
            if (hint := _hint(one)) is not None:
                say(f"  {hint}")
    for problem in problems:
        fail("diagnose", problem)
    if not looks:
        return FAILED if problems else fail("diagnose", _NONE)
    if any(one.report.verdicts for one in looks):
        return HANGS
    if not all(one.has_records for one in looks):
        if not values.json:
            fail("diagnose", "stacks do not tell whether an op hangs: no verdict")
        return FAILED
    return DONE


_NONE = (
    "no job runs that this user has started on this host by torchrun, mpiexec, srun, "
    "torch.multiprocessing or ipyparallel; --pid PID looks at any Python"
)


class _Progress:
    """Says on a terminal how many stacks were read."""

    def __init__(self, processes: int) -> None:
        self._all = 2 * processes
        self._shown = sys.stderr.isatty() and processes > 0

    def __call__(self, done: int) -> None:
        if self._shown:
            # An empty line at the end: what is printed next stands on it.
            text = f"\rreads stacks: {done} of {self._all}"
            end = "\r\x1b[K" if done == self._all else ""
            print(text, end=end, file=sys.stderr, flush=True)


def _hint(found: Look) -> str | None:
    """Return which command knows more of a job."""
    job = found.job
    if job.launcher == ENGINES:
        return "rankscope diagnose knows more of the ranks that %dist_init has started"
    if _is_watched(job) and not found.has_records:
        return (
            "rankscope.torch watches this job: rankscope diagnose knows more while its "
            "rank 0 is in torch's default group"
        )
    return None
