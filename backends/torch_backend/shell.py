"""The process group of torch that a Rankscope group does the ops of.

Up to torch 2.13 it is a ``ProcessGroup`` as a whole, so that a group has no other
backend beside it. C++ calls its methods, which some modules hold for long: so the
object stays the same while its Rankscope group is rebuilt, or shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ..groups.api import destroy_process_group
from ..groups.process_group import ProcessGroup
from ..groups.world import world
from . import hooks_on_cpu, joining, meeting
from .ops import Ops
from .options import NAME, Options
from .private import c10d, groups_name

__all__ = ["ProcessGroupRankscope", "create"]


class ProcessGroupRankscope(Ops, c10d.ProcessGroup):  # type: ignore[misc]
    """A group of ``torch.distributed`` whose ops are those of a Rankscope group.

    `ranks` are torch's global ranks; none: it is the default group. `group` is the
    Rankscope group, which is made when torch has named this one.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int],
        options: Options,
    ) -> None:
        c10d.ProcessGroup.__init__(self, rank, size)
        Ops.__init__(self)
        self._store, self._rank, self._size = store, rank, size
        self._ranks = list(ranks)
        self._name = self._description = ""
        self._owns_world = False
        # What makes the Rankscope group, until it is there.
        self._unmade: tuple[float, Options] | None
        hooks_on_cpu.install()
        if not ranks:
            self.group, self._owns_world = meeting.make_default_group(
                store, rank, size, timeout.total_seconds(), options
            )
            meeting.note_default_ranks(self.group.ranks)
            self._unmade = None
            if self._owns_world and meeting.joins_groups():
                joining.begin(rank)
        else:
            self._unmade = timeout.total_seconds(), options

    #: For the watch of torch's groups: its Rankscope group is on the board already.
    of_rankscope = True

    # -- what torch asks ------------------------------------------------------------

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def name(self) -> str:
        """Return the name of the backend."""
        return NAME

    getRank, getSize, getBackendName, _get_backend_name = rank, size, name, name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ProcessGroupRankscope:
        """Return the group itself, which is the backend of CPU tensors."""
        if torch.device(device).type != "cpu":
            # The error of torch's own groups, which its code expects.
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device)}: "
                "the backend rankscope takes tensors on the CPU"
            )
        return self

    supports_splitting = False
    supports_coalescing = True
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether the backend allocates tensors: no."""
        return False

    @property
    def options(self) -> None:
        """No options of torch's own classes."""

    def get_group_store(self) -> Any:
        """Return torch's store of the group."""
        return self._store

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for, as its maker has said."""
        return self._description

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return what the group is for."""
        return self._description

    def setGroupName(self, name: str) -> None:
        """Set torch's name of the group."""
        self._name = name

    def setGroupDesc(self, description: str) -> None:
        """Set what the group is for; the last step of torch's making a group."""
        self._description = description
        if self._unmade is not None:
            (timeout, options), self._unmade = self._unmade, None
            shown = groups_name(description)
            self.group = meeting.make_group(self._ranks, shown, timeout, options)

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: Rankscope's ops have numbers."""

    def _get_sequence_number_for_group(self) -> int:
        return self.group.status.collective_seq

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the ops that are issued from now on."""
        self.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    # -- its end ------------------------------------------------------------

    def abort(self) -> None:
        """Fail the ops in flight on every rank, with an error that says so."""
        self.group.abort("abort() of torch's process group")

    def shutdown(self) -> None:
        """Free the Rankscope group; that of the default group ends them all.

        The default group of a notebook stays: it was there before.
        """
        group = self.group
        if group.key not in {one.key for one in world.groups()}:
            return
        if self._owns_world:
            meeting.note_default_ranks([])
            fresh = joining.joining()
            if fresh is not None:
                fresh.forget()
            destroy_process_group()
        elif group is not world.default:
            destroy_process_group(group)

    # -- what torch's groups lack ------------------------------------------------------

    def replace(self, group: ProcessGroup) -> None:
        """Go on over `group`, which has fewer ranks, as the same object."""
        self.group = group
        self._rank, self._size = group.rank(), group.size()


def create(options: Any, pg_options: Any) -> ProcessGroupRankscope:
    """Make a group for torch, which has registered this function (``extended_api``)."""
    return ProcessGroupRankscope(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        list(options.global_ranks_in_group),
        meeting.take_options(pg_options),
    )
