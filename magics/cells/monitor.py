"""CellMonitor: aborts waits that cannot complete, and stops cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from html import escape

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import Verdict, in_one
from rankscope.backends.rank_sets import group_by, name_ranks, tell_ranks
from rankscope.engines import (
    Cluster,
    ClusterError,
    ClusterStatus,
    Execution,
    OpStatus,
    RankError,
    RankStatus,
)
from rankscope.engines.status import name_groups

from ..output.failures import place_of
from .abort_waiting import aborted, in_flight, out_of_step, stuck_on

__all__ = ["CellMonitor", "Hang", "activity", "name_op"]

Hang = Callable[[Collection[int]], Mapping[str, str] | None]

#: Seconds for which ranks wait for a rank that raised before their group is aborted:
#: time for ranks that are late, and for the user to read the error.
GRACE = 1.5
#: Seconds in which ranks may send their status before they are stopped.
ANSWER = 0.25
#: Seconds between two checks of the status while a rank has failed.
CHECK_PERIOD = 0.25


class CellMonitor:
    """Watches one cell; ``notify(text)`` shows the user an abort of the monitor.

    ``hang(ranks)`` is why a cell on `ranks` hangs, as an output; ``None``: it does not.
    """

    def __init__(
        self,
        cluster: Cluster,
        execution: Execution,
        notify: Callable[[str], None],
        hang: Hang = lambda ranks: None,
    ) -> None:
        self._cluster = cluster
        self._execution = execution
        self._notify, self._hang = notify, hang
        self._next_check = 0.0
        self._first_failure: float | None = None
        self._places: dict[int, str] = {}
        #: The groups that this monitor has aborted.
        self.groups: list[GroupKey] = []
        #: Why ops hung when the ranks were stopped.
        self.verdicts: list[Verdict] = []

    def tick(self, failures: Mapping[int, RankError]) -> None:
        """Abort groups in which ranks wait for one that raised; call it repeatedly."""
        now = time.monotonic()
        running = self._execution.ranks_running
        if not failures or not running:
            return
        if self._first_failure is None:
            self._first_failure = now
        if now < max(self._next_check, self._first_failure + GRACE):
            return
        self._next_check = now + CHECK_PERIOD
        status = self._cluster.status()
        for stuck in stuck_on(status, failures, running, GRACE / 2):
            cause = _raised(_first(failures, stuck.absent))
            # The cause is known: a diagnosis would repeat it.
            self._abort([stuck.group], cause, ())
            self._notify(
                f"{name_ranks(stuck.ranks)} in {name_op(stuck.op)}, which rank "
                f"{stuck.absent} will not join: group {stuck.group.name!r} aborted"
            )
        joining = [
            one.rank
            for one in status.ranks
            if one.rank in running
            and one.joining_for is not None
            and one.joining_for >= GRACE / 2
        ]
        if joining:
            first = _first(failures, min(failures))
            self._cluster.end_init(joining, _raised(first), [first.rank])
            self._notify(
                f"{name_ranks(joining)} in init_process_group, which rank {first.rank} "
                "will not join: ended"
            )

    def why_it_hangs(
        self, failures: Mapping[int, RankError]
    ) -> Mapping[str, str] | None:
        """Return why the cell does not end, as an output; ``None``: it goes on."""
        return self._hang(self._execution.ranks_running) or self.left_running(failures)

    def left_running(
        self, failures: Mapping[int, RankError]
    ) -> Mapping[str, str] | None:
        """Return where ranks are still that others have left by an abort or an error.

        They compute, or wait in a call of which no status tells. As the data of an
        output; ``None`` where the cell waits for something else.
        """
        aborted = [rank for rank, error in failures.items() if error.is_abort_echo]
        running, took = self._execution.ranks_running, self._execution.durations
        if not failures or not running or not took:
            return None
        # Else more of them are about to end.
        if time.time() < self._execution.began + max(took.values()) + GRACE:
            return None
        left = self._cluster.glance(running).ranks
        if any(
            activity(one) is not None or one.joining_for is not None or not one.alive
            for one in left
        ):
            return None
        told = group_by(left, lambda one: one.line and f"is still at {one.line}")
        where = "; ".join(
            tell_ranks([one.rank for one in those], place or "still runs the cell")
            for place, those in told.items()
        )
        first, unended = _raised(failures[min(failures)]), ""
        if aborted:
            first = f"Aborted on {name_ranks(aborted)}"
            unended = ", which an abort does not end"
        text = f"{first}; {where}{unended} (an interrupt ends the cell)"
        return {"text/plain": text, "text/html": f"<p>{escape(text)}</p>"}

    def stop(self, reason: str) -> None:
        """Abort what is in flight and interrupt the ranks that still run."""
        running = self._execution.ranks_running
        self.verdicts = self._cluster.explain()
        # The diagnosis has asked the ranks just now.
        status = self._cluster.status(timeout=ANSWER)
        self._places = {
            rank.rank: place
            for rank in status.ranks
            if rank.rank in running and (place := activity(rank)) is not None
        }
        # What has ended meanwhile is left alone: the next cell may run there.
        running = self._execution.ranks_running
        # The abort ends ranks that are in an op; an interrupt would show a second
        # error there. `interrupt` stops those that continue.
        free = [rank for rank in running if rank not in self._places]
        if free:
            self._cluster.interrupt(free, self._execution)
        groups = in_flight(status, running)
        if groups:
            # A rank that does not answer does not stop either: the caller reports it.
            self._abort(groups, reason, self.verdicts, report=False)

    def places(self) -> str:
        """Return where the ranks were when they were stopped, if no verdict says it."""
        places = dict(self._places)
        for rank, error in self._execution.errors.items():
            if error.ename == "KeyboardInterrupt" and rank not in places:
                places[rank] = place_of(error).strip()
        told = {rank for one in self.verdicts for rank in (*one.culprits, *one.waiting)}
        untold = [rank for rank in sorted(places.keys() - told) if places[rank]]
        groups = group_by(untold, places.__getitem__)
        return ", ".join(f"{name_ranks(who)} {place}" for place, who in groups.items())

    def interrupt(self) -> None:
        running = self._execution.ranks_running
        if running:
            self._cluster.interrupt(running, self._execution)

    def explain(self, errors: Mapping[int, RankError]) -> str:
        """Return why ops go on whose end the cell has not awaited; empty: none."""
        if not any(one.ename == "DistTimeoutError" for one in errors.values()):
            return ""
        if not in_flight(self._cluster.status(fresh=True), self._execution.ranks):
            return ""
        why, _ = in_one(self._cluster.explain())
        return why

    def restore(self, stopped: bool) -> str:
        """Rebuild groups that this cell has made unusable; return a text about them.

        Only the groups that this monitor has aborted and, where the ranks were
        `stopped`, those that are out of step since. Groups that were aborted by
        others, or that timed out, are left for the user to examine.
        """
        if self._execution.ranks_running:
            # No group can be rebuilt before these ranks are replaced.
            return f"{_groups(self.groups)} aborted" if self.groups else ""
        ranks, reported = self._execution.ranks, self._execution.reported
        status = self._cluster.status(fresh=[r for r in ranks if r not in reported])
        # A group that the cell has made may no longer exist.
        known = status.group_keys
        broken = [group for group in self.groups if group in known]
        if stopped:
            broken += [g for g in out_of_step(status, ranks) if g not in broken]
        hints = []
        if broken and not status.dead:
            hints = self._rebuild(broken)
        return "; ".join(hints + self._remaining(status, ranks, set(broken)))

    def _rebuild(self, groups: Sequence[GroupKey]) -> list[str]:
        """Rebuild `groups`; return a text on each, added to the cell's error."""
        rebuilt, hints = [], []
        for group in groups:
            try:
                self._cluster.rebuild(group)
                rebuilt.append(group)
            except ClusterError as error:
                hints.append(f"rebuilding group {group.name!r}: {error}")
        return [f"{_groups(rebuilt)} rebuilt", *hints] if rebuilt else hints

    def _remaining(
        self, status: ClusterStatus, ranks: Sequence[int], done: set[GroupKey]
    ) -> list[str]:
        if status.dead:
            if "restart" in status.refused:
                return [status.refused["restart"]]
            dead = name_ranks(status.dead)
            if self._cluster.restarts_together:
                return [f"{dead} dead: %dist_restart all restarts the MPI job"]
            return [f"%dist_restart and %dist_rebuild replace {dead}"]
        hints = []
        left = [group for group in aborted(status, ranks) if group not in done]
        if left:
            them = "it" if len(left) == 1 else "them"
            hints.append(f"{_groups(left)} aborted: %dist_rebuild makes {them} usable")
        uneven = [
            group
            for group in out_of_step(status, ranks)
            if group not in done and group not in left
        ]
        if uneven:
            hints.append(f"{_groups(uneven)} out of step: %dist_rebuild resets it")
        return hints

    def _abort(
        self,
        groups: Sequence[GroupKey],
        reason: str,
        verdicts: Sequence[Verdict],
        report: bool = True,
    ) -> None:
        self.groups += [group for group in groups if group not in self.groups]
        try:
            self._cluster.abort(groups, reason, verdicts=verdicts)
        except ClusterError as error:
            # The groups are aborted on the ranks that answered.
            if report:
                self._notify(f"aborting {_groups(groups)}: {error}")


def activity(rank: RankStatus) -> str | None:
    """Return the op that a rank is in as text, ``None`` if it is in none."""
    ops = [group.oldest for group in rank.groups if group.oldest is not None]
    if not ops:
        return None
    return f"in {name_op(ops[0])}"


def name_op(op: OpStatus) -> str:
    """Return ``all_reduce #14 at cell 7 line 3``, or the part of it that is known."""
    number = "" if op.seq is None else f" #{op.seq}"
    source = f" at {op.source}" if op.source else ""
    return f"{op.op}{number}{source}"


def _first(failures: Mapping[int, RankError], absent: int) -> RankError:
    """Return why `absent` does not enter: its error, or the error that caused it."""
    error = failures[absent]
    if error.is_abort_echo:
        causes = [e for e in failures.values() if not e.is_abort_echo]
        error = causes[0] if causes else error
    return error


def _raised(error: RankError) -> str:
    return f"rank {error.rank} raised {error.ename}{place_of(error)}"


def _groups(groups: Iterable[GroupKey]) -> str:
    return name_groups(group.name for group in groups)
