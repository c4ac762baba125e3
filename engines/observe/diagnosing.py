"""Diagnose hangs over all ranks: on request, and when an op is in flight for long."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.diagnosis import completed_unlike, diagnose, failed_last
from rankscope.backends.observe.stacks import Frame
from rankscope.backends.observe.verdicts import (
    ConfirmTwice,
    RankView,
    Verdict,
    in_one,
    on_group,
    on_groups,
)
from rankscope.backends.thread_start import start_thread

from ..errors import ClusterError
from ..status import ClusterStatus, RankStatus
from ..wire.requests import NcclReport
from . import silence
from .flight_records import FlightRecords
from .nccl_account import account_of_group
from .profiling import RankStacks, innermost_line, is_cell, line_name
from .rank_slots import SILENCE

__all__ = [
    "STALL",
    "STATUS_INTERVAL",
    "StallWatch",
    "by_cause",
    "causes_by_group",
    "diagnose_confirmed",
    "diagnose_once",
    "explain",
    "last_seen",
    "library_call",
    "past_faults",
]

#: Seconds in flight after which an op counts as stalled.
STALL = 5.0
#: The same where a person requests a diagnosis.
REQUESTED_STALL = 0.5
#: Seconds between the two diagnoses of which one confirms the other.
BETWEEN = 0.4
#: Seconds for which a requested diagnosis waits for NCCL's own report.
REPORT_WAIT = 2.5
#: Records that are fetched from each rank.
RECORDS = 200
#: Seconds between two checks of the watch, and between two while verdicts stand.
PERIOD = 0.25
REPORTED_PERIOD = 0.5
#: While verdicts stand: the times that a diagnosis took until the next one, and these
#: seconds at most. One of 32 ranks takes 0.6 s of CPU, an abort of them 1.4 s.
RESTS, LONGEST_REST = 4.0, 3.0

#: Seconds without a summary after which the watch sends the rank a request: one and a
#: half periods of the heartbeat. With the request's `ANSWER` seconds a verdict about a
#: process whose state is known follows within 3 s of the last heartbeat.
LATE = 1.6
ANSWER = 0.8
#: Seconds between two statuses of a rank at least, for who has a `StallWatch`: that
#: asks a rank whose last one is older than a heartbeat.
STATUS_INTERVAL = 0.5
#: Seconds without a summary after which the load of its host is named as the cause.
OVERLOADED = 10.0

#: The path of a library's file within its installation.
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\](?P<path>.*)")


class Diagnosable(Protocol):
    """The calls of `ObservedRanks` that a diagnosis makes."""

    def status(self, *, fresh: bool = ..., timeout: float = ...) -> ClusterStatus: ...

    #: While it is true, statuses have ops that are about to end.
    aborting: bool

    def glance(self) -> ClusterStatus: ...

    def flight_records(
        self, ranks: Iterable[int], *, last: int | None = ...
    ) -> FlightRecords: ...

    def stacks(self, ranks: Iterable[int]) -> RankStacks: ...

    def nccl_report(self, rank: int) -> NcclReport | None: ...

    def tell_ranks(self, verdicts: Sequence[Verdict]) -> None: ...


def diagnose_once(
    cluster: Diagnosable,
    stall: float,
    patience: float = silence.QUIET,
    report_wait: float = 0.0,
) -> list[Verdict]:
    """Diagnose all groups once; see `backends.observe.diagnosis.diagnose`.

    A rank whose silence has no known cause is at fault after `patience` seconds of it.
    NCCL's own report, which is queried where a group of NCCL has a verdict, gets
    `report_wait` seconds.
    """
    before = silence.take_samples(cluster.glance().ranks)
    status = cluster.status(fresh=True, timeout=ANSWER)
    after = silence.take_samples(status.ranks)
    if not _is_suspicious(status, stall):
        return []
    # A silent rank would delay the diagnosis by another timeout.
    # In spite of the request.
    responding = silence.responding(status.ranks)
    causes = {
        one.rank: silence.cause_of(before.get(one.rank), after.get(one.rank))
        or silence.cause_elsewhere(one, status.ranks, responding)
        for one in status.ranks
        if silence.is_silent(one)
    }
    undecided = {
        one.rank
        for one in status.ranks
        if one.rank in causes and not _is_decided(one, causes[one.rank], patience)
    }
    records = (
        cluster.flight_records(responding, last=RECORDS)
        if responding
        else FlightRecords()
    )
    stacks = cluster.stacks(responding) if responding else RankStacks({})
    views = {
        one.rank: _view(
            one,
            records,
            stacks,
            silence.describe(
                causes.get(one.rank), one.rank, one.pid, one.host, bool(status.script)
            ),
        )
        for one in status.ranks
    }
    for ranks in silence.of_hosts(status.ranks, causes):
        # One sentence tells it of all of them.
        quiet = min(views[rank].silent_for or 0.0 for rank in ranks)
        for rank in ranks:
            views[rank] = replace(views[rank], silent_for=quiet, process="")
    found = [
        one
        for one in diagnose(_groups(status), views, stall)
        # What a rank without records has issued is not known: it may be late.
        if undecided.isdisjoint(one.group.ranks)
    ]
    asked: set[GroupKey] = set()
    for place, verdict in enumerate(found):
        if verdict.group not in asked:
            asked.add(verdict.group)
            report = account_of_group(
                verdict.group, status, cluster.nccl_report, report_wait
            )
            found[place] = replace(verdict, report=report)
    return found


def diagnose_confirmed(
    cluster: Diagnosable, stall: float = REQUESTED_STALL
) -> list[Verdict]:
    second, first = ConfirmTwice(), diagnose_once(cluster, stall)
    if not first:
        return []
    second.confirm(first)
    threading.Event().wait(BETWEEN)
    # The first diagnosis has begun the query.
    return second.confirm(diagnose_once(cluster, stall, report_wait=REPORT_WAIT))


def past_faults(
    status: ClusterStatus, records: FlightRecords
) -> tuple[list[Verdict], dict[GroupKey, str]]:
    """Return what differed in completed ops, and the last ops that failed, by group."""
    views = {
        rank: RankView(rank, records=dump["records"])
        for rank, dump in records.dumps.items()
    }
    groups = _groups(status)
    return completed_unlike(groups, views), failed_last(groups, views)


def explain(
    cluster: Diagnosable, groups: Collection[GroupKey] | None = None
) -> list[Verdict]:
    """Return why ops of `groups` (``None``: all) hang, for the error that ends them."""
    found = diagnose_once(cluster, REQUESTED_STALL)
    return found if groups is None else on_groups(found, groups)


def by_cause(
    groups: Iterable[GroupKey], verdicts: Sequence[Verdict]
) -> list[tuple[list[GroupKey], list[Verdict]]]:
    """Return `groups`, those that hang for the same of `verdicts` together."""
    found: dict[tuple[int, ...], tuple[list[GroupKey], list[Verdict]]] = {}
    for key in groups:
        why = on_group(verdicts, key)
        found.setdefault(tuple(map(id, why)), ([], why))[0].append(key)
    return list(found.values())


def causes_by_group(
    verdicts: Iterable[Verdict],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the text and the ranks at fault of `verdicts`, by the id of the group."""
    found = list(verdicts)
    groups = {key for one in found for key in (one.group, *one.groups)}
    return {key.id: in_one(on_group(found, key)) for key in groups}


def library_call(frames: Sequence[Frame]) -> str:
    """Return the function of a library that the user's innermost line has called.

    Its name tells a data loader or ``torch.cuda.synchronize()`` from other calls, also
    where it blocks in a thread's lock or in a driver. Rankscope's own functions are not
    named: what they do stands in the records.
    """
    for frame in innermost_line(frames)[1]:
        library = _LIBRARY.search(frame.place)
        # A decorator's wrapper says nothing: the function that it calls does.
        if library and not frame.internal and "<locals>" not in frame.function:
            return f"`{frame.function}` of {library['path']}"
    return ""


def _view(
    one: RankStatus, records: FlightRecords, stacks: RankStacks, why_silent: str
) -> RankView:
    dump = records.dumps.get(one.rank)
    frames, stack = stacks.main_frames(one.rank), stacks.main_text(one.rank)
    cells = [frame for frame in frames if is_cell(frame)]
    location = line_name(cells[-1]) if cells else ""
    engine = "" if one.engine_id is None else f"engine {one.engine_id}, "
    if one.state == "busy" and not location and stack != "idle":
        location = stack.splitlines()[0]
    exception, exception_line = stacks.exceptions.get(one.rank, ("", ""))
    return RankView(
        one.rank,
        records=dump["records"] if dump else (),
        recorded=dump is not None,
        now_ns=time.time_ns() + records.offsets_ns.get(one.rank, 0),
        death=None
        if one.alive
        else one.death or one.reason or f"rank {one.rank} is dead",
        last_seen="" if one.alive else last_seen(one),
        crash_causes=one.crash_causes,
        # At least for `QUIET` s, if it never sent anything.
        silent_for=(
            (one.heartbeat_age or silence.QUIET) if silence.is_silent(one) else None
        ),
        silence=why_silent,
        process=f"{engine}pid {one.pid} on {one.host}",
        location=location,
        called=library_call(frames),
        last_cell_exit=one.last_cell_exit,
        last_cell_op=one.last_cell_op,
        exception=exception,
        exception_line=exception_line,
        thread_exception=stacks.thread_exceptions.get(one.rank, ""),
    )


def last_seen(one: RankStatus) -> str:
    """Return where a rank was by its last status: in an op, at a line or after an op.

    Of several groups nothing tells which has the last op.
    """
    oldest = [group.oldest for group in one.groups if group.oldest is not None]
    if oldest:
        return f"in {max(oldest, key=lambda op: op.elapsed or 0.0)}"
    if one.line:
        return f"at {one.line}"
    done = [group.completed for group in one.groups if group.completed is not None]
    return f"after {done[0]}" if len(done) == 1 else ""


def _is_decided(one: RankStatus, cause: silence.Cause | None, patience: float) -> bool:
    """Return whether the silence of a rank lasts long enough for its `cause`."""
    if cause is silence.Cause.STARVED:
        patience = OVERLOADED
    elif cause is not None:
        return True
    return one.heartbeat_age is None or one.heartbeat_age > patience


def _is_suspicious(status: ClusterStatus, stall: float) -> bool:
    """Return whether a rank is dead or late, or has an op in flight for `stall` s."""
    for rank in status.ranks:
        age = rank.heartbeat_age or 0.0
        if rank.state in ("dead", "unreachable") or age > LATE:
            return True
        for group in rank.groups:
            # As of the rank's last summary: the op goes on while the rank is silent.
            oldest = group.oldest
            if oldest is not None and (oldest.elapsed or 0.0) + age > stall:
                return True
    return False


def _contents(verdicts: Iterable[Verdict]) -> list[tuple[Any, ...]]:
    """Return what of `verdicts` a person reads; a text has the times of its moment."""
    return [(one.key, one.report) for one in verdicts]


def _groups(status: ClusterStatus) -> dict[GroupKey, int]:
    """Return the groups that a rank can use → their latest generation.

    And those in which an op failed that ended the last cell of a rank: others may wait
    for it in another group.
    """
    found: dict[GroupKey, int] = {}
    for rank in status.ranks:
        failed = rank.last_cell_op and rank.last_cell_op[0]
        for group in rank.groups:
            if group.state == "ready" or group.name == failed:
                found[group.key] = max(found.get(group.key, 0), group.generation)
    return found


class StallWatch:
    """A thread that diagnoses ops which have been in flight for long.

    ``on_change(verdicts)`` is called when the verdicts change, with ``[]`` at the end
    of a hang; the ranks are told, for the errors of ops that time out, unless `tells`
    is false, as of a viewer beside the notebook of the ranks. The thread reads the last
    known status; requests are sent to the ranks only while an op is stalled, or a rank
    is dead or silent.
    """

    def __init__(
        self,
        cluster: Diagnosable,
        on_change: Callable[[list[Verdict]], Any],
        stall: float = STALL,
        tells: bool = True,
    ) -> None:
        self._cluster = cluster
        self._on_change = on_change
        self._tells = tells
        self._stall = stall
        self._stop = threading.Event()
        # Held while what was found is told.
        self._telling = threading.RLock()
        self._thread = start_thread("stall-watch", self._run)

    def close(self) -> None:
        """Tell nothing from now on; the thread ends after the diagnosis that it makes.

        It may wait for a rank that does not answer.
        """
        with self._telling:
            self._stop.set()

    def _run(self) -> None:
        second, reported = ConfirmTwice(), list[Verdict]()
        rests_until = 0.0
        while not self._stop.wait(REPORTED_PERIOD if reported else PERIOD):
            try:
                status, began = self._cluster.glance(), time.monotonic()
                if status.state == "stopped":
                    return
                found = []
                if self._cluster.aborting:
                    continue
                if _is_suspicious(status, self._stall):
                    if reported and began < rests_until:
                        continue
                    found = diagnose_once(self._cluster, self._stall, SILENCE)
                    now = time.monotonic()
                    rests_until = now + min(RESTS * (now - began), LONGEST_REST)
            except (ClusterError, OSError):
                # The cluster was shut down: the last verdicts stand.
                return
            verdicts = second.confirm(found)
            if _contents(verdicts) == _contents(reported):
                continue
            reported = verdicts
            with self._telling:
                if self._stop.is_set():
                    return
                try:
                    if self._tells:
                        self._cluster.tell_ranks(verdicts)
                except (ClusterError, OSError):
                    return
                self._on_change(verdicts)
