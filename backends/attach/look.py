"""What was found of one job that runs, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..post_mortem.report import VERSION, Report
from ..rank_sets import format_ranks, group_by, name_ranks, tell_ranks
from .jobs import Job
from .stacks import Stack

__all__ = ["MOVES", "STACKS", "Look", "as_json"]

#: The kind of what a stack is read from.
STACKS = "py-spy stacks"
#: Characters of a command line that a text shows.
_LONGEST_COMMAND = 100
#: What is to be known of a process that does not stand still.
MOVES = "two stacks differ: it runs, and the place is one of many"


@dataclass(frozen=True)
class Look:
    """One job as it was found: its processes, where they are, and what that tells."""

    job: Job
    stacks: Mapping[int, Stack]
    #: Of the processes that have a rank.
    report: Report

    @property
    def title(self) -> str:
        """``torchrun 4711: ranks 0–3 of 4 (pids 4720–4723): train.py --lr 0.1``."""
        job = self.job
        parts = (job.launcher, str(job.pid or ""), f"({job.id})" if job.id else "")
        name = " ".join(filter(None, parts))
        return f"{name or 'processes'}: {_who(job)}: {_command(job.command)}"

    @property
    def has_records(self) -> bool:
        """Whether anything tells in which ops the ranks are."""
        return any(one.recorded for one in self.report.evidence.ranks.values())

    def as_text(self) -> str:
        lines = [self.title]
        text = replace(self.report, files=()).as_text()
        lines += [f"  {line}" for line in text.splitlines()]
        if self.has_records:
            # Else they are all that the report has.
            lines += [f"  {line}" for line in self.report.places()]
        lines += [f"  {line}" for line in self._without_rank()]
        notes = [*self._problems(), *self._notes()]
        return "\n".join([*lines, *(f"  {note}" for note in notes)])

    def _without_rank(self) -> list[str]:
        """Return ``processes 4720–4723 are at train.py:88``; alike ones once."""
        pids = (one.process.pid for one in self.job.members if one.rank is None)
        alike = group_by(pids, lambda pid: _told(self.stacks[pid]))
        lines = []
        for (verb, told), those in alike.items():
            if len(those) > 1:
                verb = _VERBS.get(verb, verb)
            who = "process" if len(those) == 1 else "processes"
            lines.append(f"{who} {_numbers(those)} {verb} {told}")
        return lines

    def _problems(self) -> list[str]:
        """Return ``ranks 0–3: the process is another user's: …``; alike ones once."""
        alike: dict[tuple[str, str], list[int]] = {}
        for one in self.report.files:
            if one.problem:
                whose = "" if one.kind == STACKS else f"{one.path}: "
                alike.setdefault((whose, one.problem), []).extend(one.ranks)
        return [
            f"{whose or f'{name_ranks(ranks)}: '}{problem}"
            for (whose, problem), ranks in alike.items()
        ]

    def _notes(self) -> list[str]:
        notes = list(self.job.notes)
        ranks = {one.rank for one in self.job.members}
        told = {
            rank for rank, one in self.report.evidence.ranks.items() if one.recorded
        }
        lacking = set(range(self.job.world_size or 0)) - ranks - told
        if lacking:
            notes.append(tell_ranks(lacking, "is not looked at"))
        if None in ranks:
            notes.append(
                "the environment of these processes does not say which ranks they are"
            )
        return notes

    def as_dict(self) -> dict[str, Any]:
        """Return the job as ``rankscope diagnose --jobs --json`` writes it."""
        job, found = self.job, self.report.as_dict()
        del found["version"]
        return {
            "launcher": job.launcher,
            "id": job.id,
            "pid": job.pid,
            "command": list(job.command),
            "processes": [
                {
                    "pid": one.process.pid,
                    "rank": one.rank,
                    **_place(self.stacks[one.process.pid]),
                }
                for one in job.members
            ],
            "notes": self._notes(),
            **found,
        }


def as_json(looks: Iterable[Look], problems: Sequence[str] = ()) -> str:
    """Return what was found as ``rankscope diagnose --jobs --json`` writes it."""
    jobs = [one.as_dict() for one in looks]
    found = {"version": VERSION, "jobs": jobs, "problems": list(problems)}
    return json.dumps(found, indent=1, ensure_ascii=False)


# -- texts -----------------------------------------------------------------------


def _who(job: Job) -> str:
    ranks = [one.rank for one in job.members if one.rank is not None]
    pids = [one.process.pid for one in job.members]
    named = f"pid {pids[0]}" if len(pids) == 1 else f"pids {_numbers(pids)}"
    if not ranks:
        return named
    of = "" if job.world_size is None else f" of {job.world_size}"
    return f"{name_ranks(ranks)}{of} ({named})"


def _numbers(pids: Iterable[int]) -> str:
    return format_ranks(pids, dash="–").replace(",", ", ")


def _command(command: Sequence[str]) -> str:
    """Return a command line, without the path of its program."""
    first = command[0].rpartition("/")[2] if command else ""
    text = " ".join([first, *command[1:]])
    cut = _LONGEST_COMMAND - 1
    return text if len(text) <= _LONGEST_COMMAND else f"{text[:cut]}…"


#: What several processes do, by what one does.
_VERBS = {"is": "are", "runs": "run"}


def _told(stack: Stack) -> tuple[str, str]:
    """Return ``is``, and ``at data.py:77 in wait of threading.py``."""
    if stack.problem:
        return "cannot", f"be read: {stack.problem}"
    if stack.line is None:
        return "runs", "no line of a program"
    called = f" in {stack.called}" if stack.called else ""
    moves = f"; {MOVES}" if stack.moves else ""
    return "is", f"at {stack.line}{called}{moves}"


def _place(stack: Stack) -> dict[str, Any]:
    line = stack.line
    return {
        "line": "" if line is None else str(line),
        "file": "" if line is None else line.file,
        "function": "" if line is None else line.function,
        "called": stack.called or "",
        "moves": stack.moves,
        "problem": stack.problem,
    }
