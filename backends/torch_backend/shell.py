"""The groups of torch that a Rankscope group does the ops of.

A group is a ``ProcessGroup`` as a whole. C++ calls its methods, and some modules hold
it for long: so the object stays the same while its Rankscope group is rebuilt, or
shrinks. Beside another backend, as in ``"cpu:rankscope,cuda:nccl"``, it is a
``Backend`` in a group of torch, whose number of ranks is fixed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import DistBackendError
from ..groups.api import destroy_process_group
from ..groups.launched import LaunchedStore
from ..groups.process_group import ProcessGroup
from ..groups.world import world
from ..rank_sets import name_ranks
from ..work.composite import completed_work
from ..work.op_type import OpType
from . import (
    constructing,
    hooks_on_cpu,
    joining,
    meeting,
    optimizer_steps,
    private,
    recovering,
    stale,
)
from .ops import Ops
from .options import NAME, Options
from .private import c10d, groups_name
from .work import TorchWork, wait_for_batches

__all__ = ["BackendRankscope", "ProcessGroupRankscope", "create"]

#: The oldest release of torch with backends in Python that have others beside them.
_MIXES = (2, 14)


class _Shell(Ops):
    """A group of torch, or its part for one device, over a Rankscope group: `group`.

    `made_by` is what torch tells the creator of a backend, and `description` what the
    group is for.
    """

    #: For the watch of torch's groups: its Rankscope group is on the board already.
    of_rankscope = True

    def __init__(self, made_by: Any, options: Options, description: str) -> None:
        Ops.__init__(self)
        self._store = made_by.store
        self._rank, self._size = made_by.group_rank, made_by.group_size
        self._made_with = options
        timeout: timedelta = made_by.timeout
        # Torch's global ranks; none: it is the default group.
        ranks = list(made_by.global_ranks_in_group)
        self._owns_world = False
        wait_for_batches()
        hooks_on_cpu.install()
        constructing.install()  # around the constructor that the former replaces
        optimizer_steps.install()
        stale.install()
        if ranks:
            self.group = meeting.make_group(
                ranks, groups_name(description), timeout.total_seconds(), options
            )
            self._see_rebuilds()
            return
        self.group, self._owns_world = meeting.make_default_group(
            self._store, self._rank, self._size, timeout.total_seconds(), options
        )
        self._see_rebuilds()
        meeting.note_default_ranks(self.group.ranks)
        store = world.store
        if self._owns_world and isinstance(store, LaunchedStore) and store.joins_groups:
            joining.begin(self._rank)

    def _see_rebuilds(self) -> None:
        # The default group of a notebook outlives this object.
        weak = weakref.ref(self)

        def note() -> None:
            shell = weak()
            if shell is not None:
                stale.note(shell)

        self.group.rebuild_hooks[id(self)] = note

    # -- what torch asks ------------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    getRank, getSize, getBackendName = rank, size, name

    supports_splitting = True
    supports_coalescing = True
    supports_shrinking = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: Rankscope's ops have numbers."""

    def _get_sequence_number_for_group(self) -> int:
        return self.group.status.collective_seq

    def set_timeout(self, timeout: timedelta) -> None:
        self.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _part(self, ranks: Sequence[int], store: Any, timeout: timedelta) -> Any:
        """Return what a creator is told of a group of `ranks` of this one."""
        known = meeting.default_ranks()
        return SimpleNamespace(
            store=store,
            group_rank=list(ranks).index(self._rank),
            group_size=len(ranks),
            timeout=timeout,
            global_ranks_in_group=[known.index(self.group.ranks[one]) for one in ranks],
        )

    # -- its end ------------------------------------------------------------

    supports_abort_hooks = True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call `hook` at each abort of the group, before the ops in flight end."""
        self.group.abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        self.group.abort_hooks.pop(hook_id, None)

    def abort(self) -> None:
        """Fail the ops in flight on every rank, with an error that says so."""
        self.group.abort("abort() of torch's process group")

    def shutdown(self) -> None:
        """Free the Rankscope group; that of the default group ends them all."""
        group = self.group
        group.rebuild_hooks.pop(id(self), None)
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


class BackendRankscope(_Shell, c10d.Backend):  # type: ignore[misc]
    """The part for one device type of a group of torch that has other backends."""

    def __init__(self, made_by: Any, options: Options, description: str) -> None:
        c10d.Backend.__init__(self, made_by.group_rank, made_by.group_size)
        _Shell.__init__(self, made_by, options, description)

    @property
    def options(self) -> Any:
        """Torch's options of the group: its timeout."""
        timeout = timedelta(seconds=self.group.timeout)
        return c10d.Backend.Options(NAME, timeout=timeout)

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> BackendRankscope:
        """Return such a part of a group of `ranks` of this one."""
        chosen, description = private.being_split()
        left_out = sorted({*range(self._size)} - {*(chosen or ranks)})
        if left_out:
            # Torch's C++ dereferences what such a rank would return, no backend.
            raise DistBackendError(
                f"split_group of {self.group.describe()}: {name_ranks(left_out)} of it "
                f"{'is' if len(left_out) == 1 else 'are'} in none of split_ranks; "
                "beside another backend torch needs each rank in one of them: add "
                f"{[[one] for one in left_out]}, or call new_group"
            )
        made_by = self._part(ranks, store, opts._timeout)
        return BackendRankscope(made_by, self._made_with, description)

    def start_coalescing(self) -> None:
        self._start_coalescing()

    def end_coalescing(self) -> TorchWork:
        return self._end_coalescing()


class ProcessGroupRankscope(_Shell, c10d.ProcessGroup):  # type: ignore[misc]
    """A group of ``torch.distributed`` whose ops are those of a Rankscope group."""

    def __init__(self, made_by: Any, options: Options, description: str) -> None:
        c10d.ProcessGroup.__init__(self, made_by.group_rank, made_by.group_size)
        self._name = self._description = ""
        self._reconfigures = getattr(made_by, "enable_reconfigure", False)
        _Shell.__init__(self, made_by, options, description)

    _get_backend_name = _Shell.name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(one) for one in self.group.config.device_backend_map]

    def _get_backend(self, device: torch.device) -> ProcessGroupRankscope:
        """Return the group itself, which is the backend of its devices."""
        wanted = torch.device(device)
        if wanted.type not in self.group.config.device_backend_map:
            # The error of torch's own groups, which its code expects.
            raise RuntimeError(
                f"No backend type associated with device type {wanted}: the group has "
                f"{self.group.config}"
            )
        return self

    supports_time_estimate = False

    @property
    def options(self) -> None:
        """No options of torch's own classes."""

    def get_group_store(self) -> Any:
        return self._store

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupName(self, name: str) -> None:
        self._name = name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroupRankscope | None:
        """Return the group of `ranks` of this one; ``None``: this rank is not in it."""
        if self._rank not in ranks:
            return None
        timeout = timeout or timedelta(seconds=self.group.timeout)
        made_by = self._part(ranks, c10d.PrefixStore(group_name, self._store), timeout)
        options = self._made_with if opts is None else meeting.take_options(opts)
        made = ProcessGroupRankscope(made_by, options, group_desc or "")
        made.setGroupName(group_name)
        made.setGroupDesc(group_desc or "undefined")
        return made

    # -- other ranks ------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Whether torch's ``enable_reconfigure=True`` was given with the group."""
        return self._reconfigures

    def get_reconfigure_handle(self) -> str:
        """Return what names this rank in `reconfigure`, and a fresh process of it."""
        return private.HANDLE.format(self.group.global_rank)

    def reconfigure(self, opts: Any) -> TorchWork:
        """Go on with the ranks whose handles are in `opts`: rebuild, or shrink."""
        recovering.reconfigure(self, opts.handles, opts.timeout)
        return TorchWork(completed_work(OpType.BARRIER, None))

    def replace(self, group: ProcessGroup) -> None:
        """Go on over `group`, which has fewer ranks, as the same object."""
        group.abort_hooks.update(self.group.abort_hooks)
        self.group = group
        self._rank, self._size = group.rank(), group.size()
        self._see_rebuilds()
        stale.note(self)


def create(made_by: Any, pg_options: Any) -> _Shell:
    """Make a group for torch, which has registered this function (``extended_api``)."""
    others, description = private.being_made(NAME)
    if not others:
        options = meeting.take_options(pg_options)
        return ProcessGroupRankscope(made_by, options, description)
    if private.release < _MIXES:
        raise DistBackendError(
            f"torch {torch.__version__} lets a backend in Python be the whole group: "
            f"rankscope beside {', '.join(others)} needs torch 2.14 or newer"
        )
    # The options are for one of the backends.
    options = pg_options if isinstance(pg_options, Options) else Options()
    return BackendRankscope(made_by, options, description)
