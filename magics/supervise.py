"""Supervisor: ends waits that nobody can end, and cells that shall end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rankscope.engines import (
    Cluster,
    ClusterError,
    ClusterStatus,
    Execution,
    OpStatus,
    RankError,
    RankStatus,
)
from rankscope.widgets import name_ranks

from .failures import is_release, place_of
from .release import aborted, in_flight, out_of_step, stuck_on

__all__ = ["Supervisor", "doing", "name_op"]

#: Seconds that the other ranks wait for a rank that raised before they are let
#: go: time for those that are on their way, and for a person to read the error.
GRACE = 1.5
#: Seconds that ranks get to say where they are before they are stopped.
ANSWER = 0.25
#: Seconds between two looks at the status while a rank has failed.
LOOK = 0.25


class Supervisor:
    """Watches one cell; `say` tells a person what was done about it."""

    def __init__(
        self, cluster: Cluster, execution: Execution, say: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._execution = execution
        self._say = say
        self._next_look = 0.0
        self._first_failure: float | None = None
        self._places: dict[int, str] = {}
        #: The groups that were aborted from here.
        self.groups: list[str] = []

    def tick(self, failures: Mapping[int, RankError]) -> None:
        """Let ranks go that wait for one that raised; call it now and then."""
        now = time.monotonic()
        running = self._execution.ranks_running
        if not failures or not running:
            return
        if self._first_failure is None:
            self._first_failure = now
        if now < max(self._next_look, self._first_failure + GRACE):
            return
        self._next_look = now + LOOK
        status = self._cluster.status()
        for stuck in stuck_on(status, failures, running, GRACE / 2):
            cause = _cause(failures, stuck.absent)
            self._abort(stuck.group, cause)
            self._say(
                f"{name_ranks(stuck.ranks)} in {name_op(stuck.op)}, which rank "
                f"{stuck.absent} will not join: group {stuck.group!r} aborted"
            )

    def stop(self, reason: str) -> None:
        """Abort what is in flight and interrupt the ranks that still run.

        Does not wait for them; where they were is noted for `places`.
        """
        running = self._execution.ranks_running
        status = self._cluster.status(fresh=True, timeout=ANSWER)
        self._places = {
            rank.rank: place
            for rank in status.ranks
            if rank.rank in running and (place := doing(rank)) is not None
        }
        # Who is in an op is ended by its error, and would show an interrupt that
        # comes on top of it. `interrupt` comes for those that go on.
        free = [rank for rank in running if rank not in self._places]
        if free:
            self._cluster.interrupt(free)
        for group in in_flight(status, running):
            # A rank that does not answer does not stop either: that is told.
            self._abort(group, reason, tell=False)

    def places(self) -> str:
        """Return in words where the ranks were when they were stopped."""
        places = dict(self._places)
        for rank, error in self._execution.errors.items():
            if error.ename == "KeyboardInterrupt" and rank not in places:
                places[rank] = place_of(error).strip()
        groups: dict[str, list[int]] = {}
        for rank in sorted(places):
            if places[rank]:
                groups.setdefault(places[rank], []).append(rank)
        return ", ".join(f"{name_ranks(who)} {place}" for place, who in groups.items())

    def interrupt(self) -> None:
        """Interrupt the ranks that still run."""
        running = self._execution.ranks_running
        if running:
            self._cluster.interrupt(running)

    def restore(self, stopped: bool) -> str:
        """Rebuild the groups that this cell has cost; return what to know about it.

        Only those that were aborted from here, and, where the ranks were
        `stopped` anywhere in their work, those that are out of step since. A
        group that somebody else aborted, or that timed out, is left as it is,
        for a person to look at.
        """
        if self._execution.ranks_running:
            # Nothing can be done before they are replaced.
            return f"{_groups(self.groups)} aborted" if self.groups else ""
        ranks = self._execution.ranks
        status = self._cluster.status(fresh=True)
        # A group that the cell made for itself may be gone with it.
        known = {group.name for rank in status.ranks for group in rank.groups}
        broken = [group for group in self.groups if group in known]
        if stopped:
            broken += [g for g in out_of_step(status, ranks) if g not in broken]
        hints = []
        if broken and not status.dead:
            hints = self._rebuild(broken)
        return "; ".join(hints + self._remaining(status, ranks, set(broken)))

    def _rebuild(self, groups: Sequence[str]) -> list[str]:
        """Rebuild `groups`; what fails is told beside the cell's own error."""
        rebuilt, hints = [], []
        for group in groups:
            try:
                self._cluster.rebuild(group)
                rebuilt.append(group)
            except ClusterError as error:
                hints.append(f"rebuilding group {group!r}: {error}")
        return [f"{_groups(rebuilt)} rebuilt", *hints] if rebuilt else hints

    def _remaining(
        self, status: ClusterStatus, ranks: Sequence[int], done: set[str]
    ) -> list[str]:
        if status.dead:
            dead = name_ranks(status.dead)
            if self._cluster.restarts_together:
                return [f"{dead} dead: %dist_restart all starts the MPI job anew"]
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
            hints.append(f"{_groups(uneven)} out of step: %dist_rebuild evens it")
        return hints

    def _abort(self, group: str, reason: str, tell: bool = True) -> None:
        if group not in self.groups:
            self.groups.append(group)
        try:
            self._cluster.abort(group, reason)
        except ClusterError as error:
            # The ranks that answered are aborted all the same.
            if tell:
                self._say(f"aborting group {group!r}: {error}")


def doing(rank: RankStatus) -> str | None:
    """Return in words the op that a rank is in, if it is in one."""
    ops = [group.oldest for group in rank.groups if group.oldest is not None]
    if not ops:
        return None
    return f"in {name_op(ops[0])}"


def name_op(op: OpStatus) -> str:
    """Return ``all_reduce #14 at cell 7 line 3``, or what of it is known."""
    number = "" if op.seq is None else f" #{op.seq}"
    source = f" at {op.source}" if op.source else ""
    return f"{op.op}{number}{source}"


def _cause(failures: Mapping[int, RankError], absent: int) -> str:
    """Why `absent` will not come: its own error, or the one that led to it."""
    error = failures[absent]
    if is_release(error):
        causes = [e for e in failures.values() if not is_release(e)]
        error = causes[0] if causes else error
    return f"rank {error.rank} raised {error.ename}{place_of(error)}"


def _groups(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names))
    return f"group {shown}" if len(names) == 1 else f"groups {shown}"
