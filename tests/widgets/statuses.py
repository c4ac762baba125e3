"""Statuses of clusters that tests make up: a rank, a group, what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankscope.backends.rank_sets import write_members
from rankscope.engines import ClusterStatus, GroupStatus, OpStatus, RankStatus

__all__ = ["cluster", "group", "op", "rank"]


def op(name: str = "all_reduce", seq: int | None = 14, **fields: Any) -> OpStatus:
    """An op, all_reduce #14 if nothing else is said."""
    return OpStatus(name, seq, **fields)


def group(
    name: str = "default", ranks: Sequence[int] = range(4), **fields: Any
) -> GroupStatus:
    """A ready group of four whose ranks have all done #14."""
    values: dict[str, Any] = {
        "backend": "cpu:tcp",
        "generation": 0,
        "state": "ready",
        "reason": None,
        "timeout": 1800.0,
        "devices": {"cpu": "tcp"},
        "enqueued": op(),
        "started": op(),
        "completed": op(),
        "in_flight": 0,
        "oldest": None,
    }
    members = write_members(tuple(ranks))
    return GroupStatus(name=name, members=members, **{**values, **fields})


def rank(number: int, *groups: GroupStatus, **fields: Any) -> RankStatus:
    """A living rank."""
    values: dict[str, Any] = {
        "engine_id": number + 10,
        "host": "node",
        "pid": 4000 + number,
        "state": "idle",
        "heartbeat_age": 0.2,
    }
    return RankStatus(rank=number, groups=groups, **{**values, **fields})


def cluster(*ranks: RankStatus, **fields: Any) -> ClusterStatus:
    """A cluster of these ranks."""
    values: dict[str, Any] = {
        "cluster_id": "c-1",
        "profile": "default",
        "launcher": "local",
        "backend": "cpu:tcp",
        "state": "running",
    }
    return ClusterStatus(ranks=ranks, **{**values, **fields})
