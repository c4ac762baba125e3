"""Going on with the same groups, models and optimizers after an abort, or a death."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as td

from ..errors import DistBackendError
from ..groups.api import rebuild_process_group
from ..groups.launched import LaunchedStore, await_round
from ..groups.subgroups import SHRINK_ABORT, shrink_group
from ..groups.world import leave_to_rebuild, world
from ..rank_sets import name_ranks
from ..work.async_errors import acknowledge
from . import hooks_on_cpu, meeting, private
from .joining import joining

__all__ = ["rebuild", "reconfigure", "rejoin", "shrink"]


#: Seconds that a rebuild waits for a rank that is started again, by default.
REBUILD_TIMEOUT = 300.0


#: One of the classes of `shell`, whose `group` is the Rankscope group.
_Shell: TypeAlias = Any


def _groups() -> list[_Shell]:
    """Return the groups of this process, the default one first."""
    backends = map(private.cpu_backend, private.registered_groups())
    found = [one for one in backends if hasattr(one, "of_rankscope")]
    if not found:
        raise DistBackendError(
            "torch has no group of the backend rankscope here: "
            "init_process_group('rankscope') makes the default group"
        )
    return found


def _whole_groups(call: str) -> list[_Shell]:
    """Return the groups of this process, none of which has another backend."""
    groups = _groups()
    for group in groups:
        if isinstance(group, private.c10d.Backend):
            raise DistBackendError(
                f"{call}: {group.group.describe()} is a part of a group of torch with "
                "other backends, which stay with its ranks: only "
                "rankscope.torch.rebuild() goes on with it"
            )
    return groups


def rebuild(timeout: float = REBUILD_TIMEOUT) -> None:
    """Do `rankscope.torch.rebuild`."""
    groups = _groups()
    fresh = joining()
    if isinstance(world.store, LaunchedStore):
        if fresh is not None and groups[0].group.aborted is None:
            fresh.end()
        else:
            _go_on(groups, world.store, timeout)
        return
    for group in groups:
        rebuild_process_group(group.group)
    if fresh is not None:
        fresh.end()


def _go_on(
    groups: Sequence[_Shell],
    store: LaunchedStore,
    timeout: float,
    *,
    without_lost: bool = False,
) -> list[int]:
    """Wait for the others in a later round; return the ranks that are lost."""
    assert world.rank is not None
    # Each rank comes to each round, and tries one again that did not begin.
    if store.complete:
        for group in groups:
            acknowledge(group.group.status)
        call = "shrink" if without_lost else "rebuild"
        leave_to_rebuild([one.group for one in groups], f"rankscope.torch.{call}()")
        store = store.next()
        world.begin_round(store)
    members = groups[0].group.ranks
    has = world.export_groups()
    return await_round(store, world.rank, members, timeout, has, goes_on=without_lost)


def shrink(
    ranks: Sequence[int] | None = None, timeout: float = REBUILD_TIMEOUT
) -> list[int]:
    """Do `rankscope.torch.shrink`."""
    groups = _whole_groups("shrink")
    default = groups[0]
    known = list(default.group.ranks)
    if isinstance(world.store, LaunchedStore):
        if ranks is not None:
            raise ValueError(
                f"shrink: ranks={list(ranks)}; in a job of rankscope.run the launcher "
                "says which ranks are lost: give none"
            )
        missing = _go_on(groups, world.store, timeout, without_lost=True)
        if not missing:
            return []
        ranks = [known.index(one) for one in missing]
    if ranks is None:
        reason = default.group.aborted
        culprits = () if reason is None else reason.culprits
        ranks = [known.index(one) for one in culprits if one in known]
        if not ranks:
            why = "it was not aborted" if reason is None else str(reason)
            raise ValueError(
                f"shrink: which ranks are lost? {default.group.describe()} names none "
                f"({why}); give ranks=[...], the same on every rank that stays"
            )
    lost = sorted(set(ranks))
    if not all(0 <= one < len(known) for one in lost) or len(lost) >= len(known):
        raise ValueError(
            f"shrink: ranks={list(ranks)}; expected ranks of the default group, from 0 "
            f"to {len(known) - 1}, and not all of them"
        )
    if default.rank() in lost:
        raise ValueError(
            f"shrink: {name_ranks(lost)} are to be left out, and this is one of them; "
            "only the ranks that stay call it"
        )
    gone = {known[one] for one in lost}
    staying = [one for one in known if one not in gone]
    for group in groups:
        before = group.group.ranks
        excluded = [place for place, one in enumerate(before) if one in gone]
        if excluded:
            group.replace(shrink_group(excluded, group.group, SHRINK_ABORT))
        elif group.group.aborted is not None:
            rebuild_process_group(group.group)
        private.renumber(group, [staying.index(one) for one in group.group.ranks])
    for one in world.groups():
        if gone & set(one.ranks):
            one.abort(f"shrink: {name_ranks(sorted(gone))} are left out")
    meeting.note_default_ranks(staying)
    return lost


def reconfigure(
    group: _Shell,
    handles: set[str] | list[str],
    timeout: timedelta | None,
) -> None:
    """Go on with the ranks of `handles`, as torch's ``_reconfigure`` says.

    All ranks: `rebuild`; fewer: `shrink`. Both are for all groups of the process.
    """
    if group is not _groups()[0]:
        raise ValueError(
            f"reconfigure: {group.group.describe()}; expected the default group, whose "
            "other groups go on with it"
        )
    known = [private.HANDLE.format(rank) for rank in group.group.ranks]
    staying = [one for one in known if one in handles]
    strange = sorted(set(handles) - set(known))
    given = handles if isinstance(handles, list) else staying + strange
    if given != staying or not staying:
        raise ValueError(
            f"reconfigure: handles={handles}; expected some of {known}, a list of them "
            "in this order"
        )
    seconds = REBUILD_TIMEOUT if timeout is None else timeout.total_seconds()
    lost = [place for place, one in enumerate(known) if one not in handles]
    if not lost:
        rebuild(seconds)
    else:
        shrink(None if isinstance(world.store, LaunchedStore) else lost, seconds)


def rejoin(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
) -> int:
    """Do `rankscope.torch.rejoin`."""
    group = _group_of(model)
    sharded = [
        name for name, one in model.named_parameters() if hasattr(one, "device_mesh")
    ]
    if sharded:
        raise ValueError(
            f"rejoin: parameter {sharded[0]!r} is sharded over the ranks, so no rank "
            "has what another one lost; load a checkpoint "
            "(torch.distributed.checkpoint.load)"
        )
    if _is_sharded(optimizer):
        raise ValueError(
            "rejoin: the state of a ZeroRedundancyOptimizer is sharded over the ranks, "
            "so no rank has what another one lost; load a checkpoint"
        )
    hooks_on_cpu.end_failed_passes(model)
    fresh = joining()
    with contextlib.nullcontext() if fresh is None else fresh.rejoining():
        return _agree(group, model, optimizer, step)


def _is_sharded(optimizer: Any) -> bool:
    # Not imported here, which takes a second: who has such an optimizer has done so.
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)


def _agree(
    group: _Shell,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int | None,
) -> int:
    """Give the model and its optimizer on all ranks the state of one rank."""
    # A fresh process has nothing to send, whatever it counts.
    lived = joining() is None
    done = lived, _steps(optimizer) if step is None else step
    replicas = list(_replicas(model))
    own = done, [private.bucket_changes(one) for one in replicas]
    told: list[Any] = [None] * group.size()
    td.all_gather_object(told, own, group=group)
    counts = [count for count, _ in told]
    most = max(counts)
    source = counts.index(most)
    # An abort may have come when some ranks had their final buckets, and some not.
    anew = not all(lived for lived, _ in counts) or any(
        one != own[1] for _, one in told
    )
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            td.broadcast(tensor.detach(), group=group, group_src=source)
    if optimizer is not None:
        _send_state(optimizer, group, source)
        optimizer.zero_grad()
    else:
        model.zero_grad()
    for module in replicas:
        private.reset_reducer(module, anew=anew)
    return int(most[1])


def _group_of(model: torch.nn.Module) -> _Shell:
    """Return the group whose ranks have the same model."""
    default = _whole_groups("rejoin")[0]
    found = {id(one.process_group): one.process_group for one in _replicas(model)}
    if not found:
        return default
    group, *others = found.values()
    if others or not hasattr(group, "of_rankscope"):
        raise ValueError(
            "rejoin: the DistributedDataParallel modules of the model have "
            f"{len(found)} groups; expected one, of the backend rankscope: call it for "
            "each of the modules"
        )
    return group


def _replicas(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for module in model.modules():
        if isinstance(module, private.DistributedDataParallel):
            yield module


def _states(optimizer: torch.optim.Optimizer) -> Iterable[Any]:
    return optimizer.state.values()


def _steps(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    found = [state["step"] for state in _states(optimizer) if "step" in state]
    return int(max(found, default=0))


def _send_state(optimizer: torch.optim.Optimizer, group: _Shell, source: int) -> None:
    """Give all ranks the state of the optimizer of rank `source`."""
    is_source = group.rank() == source
    described: list[Any] = [None]
    if is_source:
        described[0] = _shapes(optimizer.state_dict())
    td.broadcast_object_list(described, group=group, group_src=source)
    state = optimizer.state_dict() if is_source else _empty(described[0])
    for tensor in _tensors(state):
        td.broadcast(tensor, group=group, group_src=source)
    if not is_source:
        optimizer.load_state_dict(state)


class _Shape:
    """A tensor as its shape and dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _mapped(value: Any, kind: type, change: Any) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(one, kind, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(one, kind, change) for one in value)
    return value


def _shapes(state: Any) -> Any:
    return _mapped(state, torch.Tensor, _Shape)


def _empty(described: Any) -> Any:
    return _mapped(
        described,
        _Shape,
        lambda one: torch.empty(one.shape, dtype=one.dtype, device="cpu"),
    )


def _tensors(state: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(state, torch.Tensor, found.append)
    return found
