"""The process groups of torch on this rank: their names and what they do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from ..errors import DistError
from ..groups.abort_reason import AbortReason
from ..groups.key import GroupKey
from ..groups.summary import GroupStatus, OpStatus, WatchedGroup
from ..rank_sets import describe_members, write_members
from ..stores.base import Store
from ..work.flight_recorder import recorder
from . import aborting, rebuilding
from .creation import made_of
from .private.groups import Names
from .torch_record import Progress
from .unfinished import export

__all__ = ["TorchGroup", "base_name"]

#: What torch shows for a group without a description.
_UNDESCRIBED = ("", "undefined")


def base_name(group_name: str, description: str, ranks: Sequence[int]) -> str:
    """Return the name of a group of torch: its description, if it has one.

    The groups of a DeviceMesh have the names of its dimensions. A group without a
    description has torch's number of it, or its ranks where torch made up a hash.
    """
    if description not in _UNDESCRIBED:
        return description.removeprefix("mesh_")
    if group_name.isdigit():
        return f"group {group_name}"
    return describe_members(ranks)


class TorchGroup(WatchedGroup):
    """A ``ProcessGroup`` of torch as the world, the agent and the board treat it.

    `born_ns` is the time at which it was made; 0 where the watch began later.
    `refresh` is `TorchWatch.refresh`.
    """

    def __init__(
        self,
        group: Any,
        key: GroupKey,
        names: Names,
        born_ns: int,
        refresh: Callable[..., None],
    ) -> None:
        self.torch_group = group
        self.torch_name: str = group.group_name
        self.key, self.name = key, key.name
        self.born_ns = born_ns
        self.devices = names.config(group)
        self.timeout = names.timeout(group) or 0.0
        self.progress = Progress(len(key.ranks))
        self.made = made_of(group)
        self.made.name = key.name
        self._names = names
        self._refresh = refresh

    @property
    def generation(self) -> int:
        return self.made.generation

    @property
    def aborted(self) -> AbortReason | None:
        return self.made.aborted

    def summary(self) -> GroupStatus:
        self._refresh()
        progress = self.progress
        oldest = next(iter(list(progress.in_flight.values())), None)
        reason = self.aborted
        return GroupStatus(
            name=self.name,
            members=write_members(self.key.ranks),
            backend=",".join(f"{key}:{name}" for key, name in self.devices.items()),
            generation=self.generation,
            state="ready" if reason is None else "aborted",
            reason=None if reason is None else reason.ended,
            diagnosis="" if reason is None else reason.diagnosis,
            timeout=self.timeout,
            devices=dict(self.devices),
            enqueued=OpStatus.issued(progress.enqueued),
            started=OpStatus.issued(progress.started, failed=reason is not None),
            completed=OpStatus.done(progress.completed),
            aborts=self.made.aborts + (reason is not None),
            issued=self._issued(),
            op_seconds=progress.busy.seconds,
            blocked_seconds=progress.blocked.seconds,
            moved=progress.counts.totals(),
            in_flight=len(progress.in_flight),
            oldest=None
            if oldest is None
            else OpStatus.in_flight(oldest, oldest.state, oldest.since),
            library="torch",
            stale=tuple(self.made.stale),
        )

    def abort(self, reason: AbortReason) -> None:
        self._refresh(fully=True)
        oldest = next(iter(list(self.progress.in_flight.values())), None)
        rank = self.key.ranks[self.torch_group.rank()]
        aborting.abort(
            self.torch_group,
            replace(reason, by=reason.by or f"rank {rank}"),
            op=None if oldest is None else oldest.op_type.value,
            sequence_number=None if oldest is None else oldest.seq,
            source="" if oldest is None else oldest.brief()["source"],
        )
        recorder.changed()

    def unused_generation(self) -> int | None:
        # Of one that was made before the watch began, earlier sends are not known.
        used = not self.born_ns or self.progress.enqueued is not None or self._issued()
        return None if used else self.generation

    def goes_on_without(self, ranks: Collection[int]) -> bool:
        return set(ranks).isdisjoint(self.key.ranks)

    def rebuild(self, generation: int | None, store: Store | None) -> None:
        if store is None:
            raise DistError(
                f"torch's group {self.name!r} cannot be rebuilt: its ranks need a "
                "store to meet in, and this rank has none; in a notebook, %dist_init "
                "makes it"
            )
        rebuilding.rebuild(self.torch_group, generation, store)
        recorder.changed()

    def export(self) -> dict[str, Any]:
        return export(self.torch_group, self.key)

    def _issued(self) -> int:
        seen = self.progress.enqueued
        return self._names.issued(self.torch_group) or (
            0 if seen is None else seen.collective_seq_id
        )
