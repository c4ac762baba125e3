"""A job of Slurm: submitted and waited for, or this process's own, and watched."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from rankscope.backends.thread_start import start_thread

from ..errors import ClusterError, ClusterStartError
from .leashed import LeashedProcess, ProcessEnd
from .processes import printed

__all__ = ["JobInfo", "SlurmJob", "span_text", "submission"]

#: What is called of Slurm.
PROGRAMS = ("salloc", "srun", "scontrol", "scancel")
#: Options of salloc with which there would be no job that ends with the notebook.
_REFUSED = ("--no-shell", "--wrap", "--array", "-a")
#: Options of salloc that need a value.
_VALUED = "AbBcCdDFGJLmMnNpqStwx"
#: Variables of an outer job that are no options of an inner one.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
#: Seconds that a command of Slurm gets.
_COMMAND = 20.0
#: Seconds between two questions about a job that is pending, and that runs.
_ASK_PENDING, _ASK_RUNNING = 10.0, 60.0
#: Seconds before the end of the job at which a person is warned, each once.
WARNINGS = (600.0, 120.0)

#: The states of a job whose ranks live.
_ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "RESIZING", "SIGNALING")
#: A word of Slurm for the end of a job → the same in words.
_ENDS = {
    "TIMEOUT": "time limit",
    "TIMELIMIT": "time limit",
    "TIME LIMIT": "time limit",
    "DEADLINE": "deadline",
    "NODE_FAIL": "node failure",
    "NODEDOWN": "node failure",
    "NODEFAIL": "node failure",
    "NODE FAILURE": "node failure",
    "PREEMPTED": "preempted by another job",
    "PREEMPTION": "preempted by another job",
    "OUT_OF_MEMORY": "out of memory",
    "CANCELLED": "cancelled, as by scancel",
    "COMPLETED": "its allocation was released",
}
#: Slurm's reason for what may stay pending for good → the same in words.
_REASONS = {
    "BadConstraints": "no node has what it asks for",
    "PartitionConfig": "its partition does not have, or not allow, what it asks for",
    "PartitionNodeLimit": "its partition allows, or has up, fewer nodes",
    "PartitionTimeLimit": "its partition allows less time",
}
#: What a step says to its stderr when Slurm ends it.
_STEP_END = re.compile(r"CANCELLED AT \S+(?: DUE TO ([A-Z ]*[A-Z]))?")


@dataclass(frozen=True)
class JobInfo:
    """What ``scontrol show job`` says of a job."""

    state: str
    reason: str = ""
    nodes: str = ""
    #: The number of its tasks.
    tasks: int | None = None
    #: When it starts, where that is expected, and when it ends, in seconds since 1970.
    start: float | None = None
    end: float | None = None

    @classmethod
    def parse(cls, text: str) -> JobInfo:
        found: dict[str, str] = {}
        for key, value in re.findall(r"(\S+?)=(\S*)", text):
            found.setdefault(key, value)
        tasks = found.get("NumTasks", "")
        reason, nodes = found.get("Reason", ""), found.get("NodeList", "")
        return cls(
            state=found.get("JobState", ""),
            reason="" if reason == "None" else reason,
            nodes="" if nodes == "(null)" else nodes,
            tasks=int(tasks) if tasks.isdecimal() else None,
            start=_seconds(found.get("StartTime", "")),
            end=_seconds(found.get("EndTime", "")),
        )

    @property
    def alive(self) -> bool:
        """Whether the job has not ended, and does not just end."""
        return self.state in _ALIVE

    def why_ended(self, said: str) -> str:
        """Return why it ended, in words; `said` is what its steps have said of it."""
        told = [one[1] or "CANCELLED" for one in _STEP_END.finditer(said)]
        for word in (self.reason, self.state, *reversed(told)):
            if word.upper() in _ENDS:
                return _ENDS[word.upper()]
        return f"Slurm says {self.state}{f', {self.reason}' if self.reason else ''}"


def _seconds(text: str) -> float | None:
    """Return a time of Slurm's, which is local, in seconds since 1970."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        # Unknown, or N/A.
        return None


def span_text(seconds: float) -> str:
    """Return a span of time as ``42 s``, ``12 min`` or ``1 h 20 min``."""
    if seconds < 120:
        return f"{max(0, int(seconds))} s"
    minutes = int(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def submission(options: str) -> list[str]:
    """Return the command that submits a job, which ends with it, and with its stdin."""
    words = shlex.split(options)
    for before, word in zip(["", *words], words, strict=False):
        flag = word.partition("=")[0]
        if flag in _REFUSED:
            raise ValueError(f"{flag} does not go with ranks that end with the job")
        if word == ":":
            raise ValueError("the parts of a heterogeneous job share no ranks: no ':'")
        # A value follows an option; salloc would run any other word as its command.
        if not word.startswith("-") and not before.startswith("-"):
            raise ValueError(f"{word!r} is no option of salloc")
    if words and len(words[-1]) == 2 and words[-1][1] in _VALUED:
        raise ValueError(
            f"{words[-1]} needs a value; all options are within one pair of quotes, as "
            '"-N 2 -t 1:00:00"'
        )
    named = any(word.startswith(("-J", "--job-name")) for word in words)
    name = [] if named else ["--job-name=rankscope"]
    # JSON, as all that is read from a leashed process.
    leash = 'echo "{\\"job\\": \\"$SLURM_JOB_ID\\"}"; exec cat'
    return ["salloc", *name, *words, "sh", "-c", leash]


def slurm_environment() -> dict[str, str]:
    """Return this process's environment without what Slurm has set for its own job."""
    return {
        key: value
        for key, value in os.environ.items()
        if key in _KEPT or not key.startswith("SLURM_")
    }


class SlurmJob:
    """A job that is submitted with `options`, or without any the one we are in.

    With a `number` it is a job of another process, which runs. What waits runs on the
    thread of an event loop, everything else on any.

    Raises `ClusterError` where there is no Slurm, or no job, and `ValueError` for
    `options` that cannot be.
    """

    def __init__(self, options: str | bool = True, number: str = "") -> None:
        if (missing := _missing_program()) is not None:
            raise ClusterError(
                f"slurm: there is no {missing} on this host: run the notebook where "
                "jobs are submitted from, as on a login node, or on a node of a job"
            )
        #: The number of the job, once it has its nodes.
        self.id = ""
        #: Whether it may outlive this process.
        self.kept = False
        self._command: list[str] = []
        if isinstance(options, str) and options.strip():
            self._command = submission(options)
        else:
            self.id = number or os.environ.get("SLURM_JOB_ID", "")
            if not self.id:
                raise ClusterError(
                    "slurm: this process is in no job of Slurm (no SLURM_JOB_ID): give "
                    "salloc's options to submit one, as -N 2 -t 1:00:00"
                )
        #: The last that was heard of it.
        self.info = JobInfo("")
        #: Why it has ended, once that is known.
        self.ended = ""
        #: What holds the job; ``None`` for one that is not ours.
        self.salloc: LeashedProcess | None = None
        self._began = time.monotonic()
        self._asked = 0.0
        self._warned = 0
        self._watched, self._answered = threading.Event(), threading.Event()

    @classmethod
    def watched(cls, number: str) -> SlurmJob | None:
        """Return the job with a number, watched; ``None`` where Slurm is not here."""
        if not number or _missing_program() is not None:
            return None
        job = cls(number=number)
        job.watch()
        return job

    # -- the start -----------------------------------------------------------

    def prepare(self) -> None:
        """Start the process that is to submit it, if it is to be ours."""
        if self._command:
            salloc, *options = self._command
            if self.kept:
                # Of itself salloc waits for its command, whatever becomes of the job.
                options.insert(0, "--kill-command")
            # It waits until `allocate` has asked for nodes.
            waits = ["sh", "-c", 'read go && exec "$@"', "sh", salloc, *options]
            # With a keeper, which ends it by a signal, too: a job that is pending does
            # not end with the stdin of salloc.
            self.salloc = LeashedProcess(
                waits, lambda process: None, env=slurm_environment(), kept=True
            )

    async def allocate(self) -> list[str]:
        """Submit it, wait until it has nodes, and return their names."""
        if self.salloc is not None:
            try:
                answer = await self.salloc.ask({})
            except ProcessEnd:
                raise ClusterStartError(
                    f"Slurm gives no nodes for {shlex.join(self._command[1:-3])}"
                    f"{self.salloc.last_lines()}"
                ) from None
            self.salloc.listens = True
            self.id = answer["job"]
        await self.ask()
        if not self.info.nodes:
            raise ClusterStartError(
                f"job {self.id} has no nodes: Slurm says {self.info.state or 'nothing'}"
            )
        self.watch()
        names = "scontrol", "show", "hostnames", self.info.nodes
        return (await asyncio.to_thread(_printed, *names)).split()

    async def pending(self) -> str:
        """Return what it waits for, and for how long it has."""
        submitted = self.number
        if not submitted:
            return "submitting a job to Slurm"
        now = time.monotonic()
        if now - self._asked > _ASK_PENDING:
            await self.ask()
        waited = span_text(now - self._began)
        if self.info.state != "PENDING":
            return f"job {submitted}: its nodes get ready ({waited})"
        start = "" if self.info.start is None else _clock(self.info.start)
        expected = f"; Slurm expects its start at {start}" if start else ""
        reason = self.info.reason or "no reason yet"
        words = f", {_REASONS[reason]}" if reason in _REASONS else ""
        return (
            f"job {submitted} is pending for {waited}: {reason}{words}{expected} "
            "(an interrupt cancels it)"
        )

    @property
    def number(self) -> str:
        """The number of the job, also while it is pending; empty before."""
        if not self.id and self.salloc is not None:
            found = re.search(r"allocation (\d+)", self.salloc.output)
            return found[1] if found else ""
        return self.id

    # -- while it runs -------------------------------------------------------

    async def ask(self) -> JobInfo:
        await asyncio.to_thread(self._ask)
        return self.info

    def _ask(self) -> None:
        self._asked = time.monotonic()
        # Where the controller does not answer, what was known is the last.
        text = _printed("scontrol", "show", "job", "-o", self.number)
        if text:
            self.info = JobInfo.parse(text)
        self._answered.set()

    def await_answer(self, timeout: float) -> None:
        """Wait until Slurm was asked once, at most `timeout` s."""
        self._answered.wait(timeout)

    def watch(self) -> None:
        """Keep up with the end of the job, which an administrator may move."""
        self._watched.clear()
        start_thread("slurm-job", self._watch)

    def _watch(self) -> None:
        self._ask()
        while not self._watched.wait(_ASK_PENDING):
            # When it resumes, ranks may be restarted again.
            if self.suspended or time.monotonic() - self._asked > _ASK_RUNNING:
                self._ask()

    def stop_watching(self) -> None:
        self._watched.set()

    async def why_ended(self, outputs: Callable[[], Iterable[str]]) -> str:
        """Return why the job has ended; empty while it runs.

        `outputs` are what its steps have said by then.
        """
        if not self.ended:
            await self.ask()
            self._note_end(outputs)
        return self.ended

    def find_end(self) -> str:
        """Return the same, where no step is ours."""
        if not self.ended:
            self._ask()
            self._note_end(tuple)
        return self.ended

    def _note_end(self, outputs: Callable[[], Iterable[str]]) -> None:
        if self.info.state and not self.info.alive:
            why = self.info.why_ended("\n".join(outputs()))
            self.ended = f"Slurm's job {self.id} ended: {why}"

    @property
    def suspended(self) -> bool:
        """Whether it was, as for another job, when Slurm was last asked."""
        return self.info.state == "SUSPENDED"

    @property
    def left(self) -> float | None:
        """Seconds until its end; ``None`` where it has none."""
        return None if self.info.end is None else max(0.0, self.info.end - time.time())

    @property
    def text(self) -> str:
        """The job and the time that is left of it, in some words."""
        left = self.left
        if self.ended:
            return self.ended
        if self.suspended:
            return (
                f"Slurm's job {self.id} is suspended: its ranks stand still until it "
                "resumes"
            )
        if self.info.state and not self.info.alive:
            return f"Slurm's job {self.id} ended: {self.info.why_ended('')}"
        if left is None:
            return f"Slurm's job {self.id}"
        return f"Slurm's job {self.id}: {span_text(left)} left"

    def warning(self) -> str:
        """Return a sentence when the end of the job has come near, each time once."""
        left = self.left
        if self.ended or left is None or self.info.end is None:
            return ""
        passed = sum(left <= seconds for seconds in WARNINGS)
        if passed <= self._warned:
            return ""
        self._warned = passed
        return (
            f"Slurm's job {self.id} ends in {span_text(left)}, at "
            f"{_clock(self.info.end)}, and all its ranks with it"
        )

    # -- the end -------------------------------------------------------------

    @property
    def cancel(self) -> list[str]:
        """The command that cancels a job that is ours; empty for one that is not."""
        known = self.number if self.salloc is not None else ""
        return ["scancel", "--quiet", known] if known else []

    def close(self, timeout: float) -> None:
        """Release its nodes, or cancel it while it is pending."""
        self.stop_watching()
        if self.salloc is None:
            return
        cancel = self.cancel
        self.salloc.close(timeout)
        # It was killed, and could release nothing.
        if cancel and (self.salloc.exit_code or 0) < 0:
            subprocess.run(
                cancel, check=False, timeout=_COMMAND, stderr=subprocess.DEVNULL
            )


def _missing_program() -> str | None:
    return next((one for one in PROGRAMS if shutil.which(one) is None), None)


def _printed(*command: str) -> str:
    return printed(*command, timeout=_COMMAND, env=slurm_environment())


def _clock(when: float) -> str:
    """Return a time of day, with the date where it is not that of today."""
    then, now = datetime.fromtimestamp(when), datetime.now()
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%Y-%m-%d %H:%M}"
