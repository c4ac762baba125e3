"""Decisions about groups during and after a cell; pure functions of the status.

A rank whose cell raised does not enter the collective in which others wait for it.
Without an abort they wait until the group's timeout (half an hour).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from rankscope.backends.groups.key import GroupKey
from rankscope.engines import ClusterStatus
from rankscope.engines.status import GroupStatus, OpStatus

__all__ = ["Stuck", "aborted", "in_flight", "out_of_step", "stuck_on"]

_P2P = ("send", "recv")


@dataclass(frozen=True)
class Stuck:
    """A group in which `ranks` wait in `op` for rank `absent`, whose cell raised."""

    group: GroupKey
    op: OpStatus
    ranks: tuple[int, ...]
    absent: int


def stuck_on(
    status: ClusterStatus,
    failed: Collection[int],
    running: Collection[int],
    grace: float,
) -> list[Stuck]:
    """Return the groups in which running ranks wait for one of `failed`.

    `failed` are the ranks on which the cell has raised, `running` those on
    which it still runs. A rank counts as waiting once its oldest op is older
    than `grace` seconds, and an op that all failed ranks of the group had
    entered is not stuck: it will complete. A failed rank that has not made the
    group, or has left it, enters none of its ops.
    """
    found = []
    raised = {one.rank for one in status.ranks if one.alive}.intersection(failed)
    for group, views in _groups(status):
        waiting: dict[int, tuple[OpStatus, int]] = {}
        for rank in sorted(set(running) & views.keys()):
            op = views[rank].oldest
            if op is None or views[rank].state == "aborted":
                continue
            if op.elapsed is None or op.elapsed < grace:
                continue
            absent = _absent(op, group, views, raised)
            if absent is not None:
                waiting[rank] = (op, absent)
        if waiting:
            op, absent = next(iter(waiting.values()))
            found.append(Stuck(group, op, tuple(waiting), absent))
    return found


def _absent(
    op: OpStatus,
    group: GroupKey,
    views: dict[int, GroupStatus],
    failed: Collection[int],
) -> int | None:
    """Return the failed rank that `op` waits for, if there is one."""
    for rank in sorted(set(failed).intersection(group.ranks)):
        if op.op in _P2P:
            # A rank of the group, not of the world.
            if op.peer is None or group.ranks.index(rank) == op.peer:
                return rank
            continue
        last = views[rank].enqueued if rank in views else None
        if last is None or last.op in _P2P or last.seq is None or op.seq is None:
            return rank
        if last.seq < op.seq:
            return rank
    return None


def in_flight(status: ClusterStatus, ranks: Collection[int]) -> list[GroupKey]:
    return _where(lambda one: one.in_flight and one.state != "aborted", status, ranks)


def aborted(status: ClusterStatus, ranks: Collection[int]) -> list[GroupKey]:
    return _where(lambda one: one.state == "aborted", status, ranks)


def _where(
    holds: Callable[[GroupStatus], object],
    status: ClusterStatus,
    ranks: Collection[int],
) -> list[GroupKey]:
    """Return the groups for which that holds as one of `ranks` sees them."""
    return [
        group
        for group, views in _groups(status)
        if any(holds(view) for rank, view in views.items() if rank in ranks)
    ]


def out_of_step(status: ClusterStatus, ranks: Collection[int]) -> list[GroupKey]:
    """Return the groups whose ranks have issued unequal numbers of collectives."""
    found = []
    for group, views in _groups(status):
        counts = {
            None if view.enqueued is None else view.enqueued.seq
            for view in views.values()
            if view.enqueued is None or view.enqueued.op not in _P2P
        }
        if len(counts) > 1 and not views.keys().isdisjoint(ranks):
            found.append(group)
    return found


def _groups(status: ClusterStatus) -> Iterable[tuple[GroupKey, dict[int, GroupStatus]]]:
    """Each group as its living ranks see it."""
    found: dict[GroupKey, dict[int, GroupStatus]] = {}
    for rank in status.ranks:
        if rank.alive:
            for group in rank.groups:
                found.setdefault(group.key, {})[rank.rank] = group
    return found.items()
