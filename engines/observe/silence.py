"""Why a rank is silent, as `/proc` of its host shows it: stopped, GIL held, starved.

A heartbeat is missed for four reasons: the process is stopped, a call holds the GIL,
the host has no CPU time for it, or the connection is lost. `/proc` tells the first
three apart, for the engines of this host: a thread that waits for the GIL wakes every
few milliseconds (``sys.getswitchinterval``), and the scheduler counts the time that a
thread waits for a CPU. Of another host it is known whether other engines there answer.
"""

from __future__ import annotations

import enum
import socket
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankscope.backends.rank_sets import group_by
from rankscope.backends.stores.process_end import stat_fields

from ..status import RankStatus

__all__ = [
    "QUIET",
    "Cause",
    "Sample",
    "cause_of",
    "describe",
    "is_silent",
    "of_hosts",
    "responding",
    "sample",
    "take_samples",
]

#: Seconds without a summary after which a rank would not answer a request.
QUIET = 2.0

#: Seconds without a heartbeat after which the process of a rank is looked at: one
#: period of the heartbeat.
LATE = 1.0
#: Wake-ups per second of the status thread from which on it waits for the GIL: such a
#: thread wakes 200 times a second, an idle one at most 10 times.
GIL_WAKES = 50.0
#: The share of the time that a thread waits for a CPU from which on it is starved.
STARVED = 0.75


def is_silent(one: RankStatus) -> bool:
    """Return whether a rank that lives sent no summary for `QUIET` s."""
    return one.alive and (one.heartbeat_age is None or one.heartbeat_age > QUIET)


def responding(ranks: Iterable[RankStatus]) -> list[int]:
    """Return those of `ranks` that answer a request, by their last summaries."""
    return [one.rank for one in ranks if one.alive and not is_silent(one)]


class Cause(enum.Enum):
    """Why a process does not answer."""

    STOPPED = "stopped"
    HOLDS_GIL = "holds the GIL"
    STARVED = "starved"
    #: Others of its host answer.
    ALONE = "alone"
    #: It is on another host, and no engine of that host answers.
    HOST = "host"


@dataclass(frozen=True)
class Sample:
    """What the kernel knows about a process at one moment."""

    #: ``time.monotonic()``.
    at: float
    #: The state's letter in ``/proc``: ``T`` and ``t`` are stopped.
    state: str
    #: How often the status thread of the agent went to sleep; ``None``: not known.
    sleeps: int | None
    #: Thread → seconds that it has waited for a CPU.
    delays: dict[str, float]


def take_samples(ranks: Iterable[RankStatus]) -> dict[int, Sample]:
    """Return rank → a sample, for the living ranks of this host that are late."""
    here = socket.gethostname()
    found = {}
    for one in ranks:
        late = one.heartbeat_age is None or one.heartbeat_age > LATE
        if one.alive and late and one.host == here:
            taken = sample(one.pid, one.status_thread)
            if taken is not None:
                found[one.rank] = taken
    return found


def sample(pid: int, status_thread: int | None) -> Sample | None:
    """Return a sample of a process; ``None`` where `/proc` does not show it."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        state = stat_fields(pid)[0].decode()
        delays = {one.name: _delay(one) for one in tasks.iterdir()}
        sleeps = None if status_thread is None else _sleeps(tasks / str(status_thread))
    except (OSError, ValueError, IndexError):
        # The process or a thread has ended, or belongs to another user.
        return None
    return Sample(time.monotonic(), state, sleeps, delays)


def _delay(task: Path) -> float:
    try:
        return int((task / "schedstat").read_bytes().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        # The thread has ended, or the kernel keeps no such statistics.
        return 0.0


def _sleeps(task: Path) -> int:
    text = (task / "status").read_text(encoding="utf-8", errors="replace")
    return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def cause_of(before: Sample | None, after: Sample | None) -> Cause | None:
    """Return why a process was silent between two samples; ``None``: not known."""
    if after is None:
        return None
    if after.state in "Tt":
        return Cause.STOPPED
    if before is None or after.at <= before.at:
        return None
    seconds = after.at - before.at
    delays = (
        delay - before.delays.get(thread, delay)
        for thread, delay in after.delays.items()
    )
    if max(delays, default=0.0) > STARVED * seconds:
        return Cause.STARVED
    if before.sleeps is None or after.sleeps is None:
        return None
    wakes = (after.sleeps - before.sleeps) / seconds
    return Cause.HOLDS_GIL if wakes >= GIL_WAKES else None


def cause_elsewhere(
    one: RankStatus, ranks: Iterable[RankStatus], responding: Container[int]
) -> Cause | None:
    """Return why an engine of another host is silent; ``None`` for one of this host."""
    if one.host == socket.gethostname():
        return None
    there = (other for other in ranks if other.host == one.host)
    return (
        Cause.ALONE if any(other.rank in responding for other in there) else Cause.HOST
    )


def of_hosts(
    ranks: Iterable[RankStatus], causes: Mapping[int, Cause | None]
) -> list[list[int]]:
    """Return the silent ranks of each host of which none answers."""
    silent = [one for one in ranks if causes.get(one.rank) is Cause.HOST]
    found = group_by(silent, lambda one: one.host)
    return [[one.rank for one in there] for there in found.values()]


def describe(
    cause: Cause | None, rank: int, pid: int, host: str, script: bool = False
) -> str:
    """Return the cause as a clause with what to do; empty if it is not certain."""
    replace = (
        f"kill -9 {pid} ends it, and torchrun starts the ranks again, if it may "
        "(--max-restarts)"
        if script
        else f"%dist_restart {rank} replaces it"
    )
    if cause is Cause.STOPPED:
        return (
            "its process is stopped (SIGSTOP, or a debugger): "
            f"kill -CONT {pid} continues it, {replace}"
        )
    if cause is Cause.HOLDS_GIL:
        return (
            "its process runs, but a call holds the GIL, e.g. inside CUDA "
            f"(py-spy dump --native --pid {pid} shows which): {replace}"
        )
    if cause is Cause.STARVED:
        return "its threads wait for a CPU: its host has too much to do"
    if cause is Cause.ALONE:
        return (
            f"other ranks of {host} answer, so its process is stopped, gets no CPU, or "
            "a call holds the GIL, e.g. inside CUDA "
            f"(there: py-spy dump --native --pid {pid}): {replace}"
        )
    if cause is Cause.HOST:
        return (
            f"no rank of {host} answers: the host or the network to it is down, or "
            "else its processes are stopped or hold the GIL"
        )
    return ""
