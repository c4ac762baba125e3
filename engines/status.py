"""What is known about a cluster at one moment: plain data, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ClusterStatus", "GroupStatus", "OpStatus", "RankStatus"]


@dataclass(frozen=True)
class OpStatus:
    """One op of a rank on one group."""

    op: str
    #: The group's sequence number of the op, ``None`` where it has none.
    seq: int | None = None
    #: ``scheduled``, ``started``, ... where it is known.
    state: str = ""
    #: Seconds since it started (or was queued, if it has not started).
    elapsed: float | None = None
    #: Seconds after which it fails.
    timeout: float | None = None
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    #: The bytes it moves, as nccl-tests counts them.
    nbytes: int | None = None
    #: Seconds it took, once it is completed.
    duration: float | None = None
    peer: int | None = None
    #: The user's line, e.g. ``cell 7 line 3``.
    source: str = ""


@dataclass(frozen=True)
class GroupStatus:
    """One group as one of its ranks sees it."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    generation: int
    #: ``ready`` or ``aborted``.
    state: str
    reason: str | None
    timeout: float
    #: Device type → backend, with ``(not built)`` behind one not used yet.
    devices: Mapping[str, str]
    enqueued: OpStatus | None
    started: OpStatus | None
    completed: OpStatus | None
    in_flight: int
    oldest: OpStatus | None
    #: How many collectives were issued on it in this generation.
    issued: int | None = None


@dataclass(frozen=True)
class RankStatus:
    """One rank: its engine, what its main thread does, and its groups."""

    rank: int
    engine_id: int
    host: str
    pid: int
    #: ``idle``, ``busy``, ``unreachable`` (alive, but nothing heard) or ``dead``.
    state: str
    #: Why it is dead.
    reason: str | None = None
    #: Seconds since anything was heard, ``None`` before the first time.
    heartbeat_age: float | None = None
    #: The number of the cell that runs.
    cell: int | None = None
    #: Seconds since that cell began.
    busy_for: float | None = None
    #: ``GPU 0 · NVIDIA H200 · 1.2 of 139.8 GiB``, empty where there is none.
    gpu: str = ""
    groups: tuple[GroupStatus, ...] = ()
    #: Everything the rank said, as it came.
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether the engine lives (it may still be busy or silent)."""
        return self.state != "dead"

    def group(self, name: str) -> GroupStatus | None:
        """Return the group called `name` if this rank is in it."""
        return next((one for one in self.groups if one.name == name), None)


@dataclass(frozen=True)
class ClusterStatus:
    """All ranks of a cluster at one moment."""

    cluster_id: str
    profile: str
    launcher: str
    backend: str
    #: ``running`` or ``stopped``.
    state: str
    ranks: tuple[RankStatus, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def dead(self) -> list[int]:
        """The ranks whose engine is gone."""
        return [one.rank for one in self.ranks if not one.alive]

    @property
    def groups(self) -> dict[str, list[int]]:
        """Group name → its ranks, the default group first.

        As any member tells it: the others may not have reported it yet.
        """
        found: dict[str, set[int]] = {}
        for rank in self.ranks:
            for group in rank.groups:
                found.setdefault(group.name, set()).update(group.ranks)
        return {name: sorted(ranks) for name, ranks in found.items()}
