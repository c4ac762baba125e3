"""Going on with the same models and optimizers after an abort, or a death."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as td

from . import hooks_on_cpu, optimizer_steps, private, sharded, stale
from .agreement import Held, Hook, LostStateError, choose
from .constructing import tell_rejoin
from .joining import joining
from .private import Shell
from .recovering import whole_groups

__all__ = ["rejoin"]


#: Models here that have parts of two steps: they get another rank's state, or that of
#: a checkpoint, and an error came meanwhile.
_torn: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def rejoin(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    load: Callable[[], int] | None = None,
    group: Shell | None = None,
) -> int:
    """Do `rankscope.torch.rejoin`."""
    groups = whole_groups("rejoin")
    if group is None:
        group = groups[0]
    elif not hasattr(group, "of_rankscope"):
        raise ValueError(
            f"rejoin: group={group!r}; expected one of the backend rankscope"
        )
    for name, module in model.named_modules():
        if sharded.is_of(module, sharded.FSDP1):
            raise ValueError(
                f"rejoin: module {name!r} is a FullyShardedDataParallel, of which "
                "nobody knows what a pass that failed has left; expected "
                "torch.distributed.fsdp.fully_shard"
            )
    fresh = joining()
    if sharded.overlaps(optimizer) and (fresh or group.group.generation):
        raise ValueError(
            "rejoin: the optimizer is a ZeroRedundancyOptimizer with overlap_with_ddp, "
            "which keeps the buckets of DDP, and what a pass that failed has left: "
            "make it and the DistributedDataParallel anew, and load a checkpoint"
        )
    hooks_on_cpu.end_failed_passes(model)
    tell_rejoin(groups, group.group.ranks)
    with (
        stale.accepting(),
        contextlib.nullcontext() if fresh is None else fresh.rejoining(),
    ):
        found = _agree(group, model, optimizer, step, load)
    stale.accept(groups, model, optimizer)
    return found


def _agree(
    group: Shell,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int | None,
    load: Callable[[], int] | None,
) -> int:
    """Have the model and its optimizer on all ranks be of one step."""
    own = _held(group, model, optimizer, step)
    told = _told(group, own)
    # An abort may have come when some ranks had their final buckets, and some not.
    anew = any(one.is_fresh or one.buckets != own.buckets for one in told.values())
    try:
        found, sources = choose(told)
    except LostStateError:
        if load is None:
            raise
        _torn.add(model)
        found = load()
        returned = _told(group, found)
        if set(returned.values()) != {found}:
            raise ValueError(
                f"rejoin: load returned {list(returned.values())} on ranks "
                f"{list(returned)}; expected the same step"
            ) from None
    else:
        rank = td.get_rank()
        if len(own.replicas) > 1:
            if (own.steps or 0) != found:
                _torn.add(model)
            _send(_group_of(own.replicas), model, optimizer, sources[rank])
    _torn.discard(model)
    optimizer_steps.forget(model)
    model.zero_grad()
    if optimizer is not None:
        optimizer.zero_grad()
    for module in private.replicas(model):
        private.reset_reducer(module, anew=anew)
    for schedule in sharded.schedules(model):
        sharded.reset_schedule(schedule)
    _begin_hooks_anew(model, told)
    return found


def _told(group: Shell, value: Any) -> dict[int, Any]:
    """Return what each rank of the group gave as `value`."""
    told: list[Any] = [None] * group.size()
    td.all_gather_object(told, value, group=group)
    return dict(zip(td.get_process_group_ranks(group), told, strict=True))


# -- what this rank has ------------------------------------------------------------


def _held(
    group: Shell, model: torch.nn.Module, optimizer: Any, step: int | None
) -> Held:
    ranks = set(td.get_process_group_ranks(group))
    for module in private.replicas(model):
        if not hasattr(module.process_group, "of_rankscope"):
            raise ValueError(
                "rejoin: a DistributedDataParallel of the model has a group of another "
                "backend; expected one of the backend rankscope"
            )
        ranks &= {*td.get_process_group_ranks(module.process_group)}
    described, refusal = [], ""
    for schedule in sharded.schedules(model):
        for stage in sharded.stages(schedule):
            # They have other stages, which may have the same shapes.
            # Torch 2.7 knows no group None, the default one.
            left = td.get_process_group_ranks(stage.group or td.group.WORLD)
            ranks -= {*left} - {td.get_rank()}
            if len(left) < stage.group_size:
                refusal = (
                    f"rejoin: stage {stage.stage_index} of a pipeline has a group that "
                    f"has lost ranks ({len(left)} of {stage.group_size} are "
                    f"left), and their stages are on no rank of it: {_MAKE_ANEW}"
                )
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        mesh = sharded.lost_ranks(one)
        if mesh is not None:
            refusal = (
                f"rejoin: a parameter is sharded over {mesh}, which has lost ranks: no "
                f"such model goes on over a part of its mesh; {_MAKE_ANEW}"
            )
        elif hasattr(one, "device_mesh"):
            ranks &= _with_same_shard(one)
        described.append((name, tuple(_local(one).shape), one.dtype))
    is_whole = model not in _torn and not optimizer_steps.is_cut_short(model)
    if sharded.is_of(optimizer, sharded.ZERO):
        # Each rank has a part of its state, and sends what it has stepped within step:
        # after an error nobody knows how far that came.
        ranks = {td.get_rank()}
        is_whole = is_whole and group.group.generation == 0
        optimizer = optimizer.optim
    return Held(
        replicas=tuple(sorted(ranks)),
        layout=hashlib.sha256(repr(described).encode()).hexdigest(),
        steps=_steps(optimizer) if step is None else step,
        is_fresh=joining() is not None,
        is_whole=is_whole,
        buckets=tuple(private.bucket_changes(one) for one in private.replicas(model)),
        hooks=_hooks_of(model),
        refusal=refusal,
    )


_MAKE_ANEW = (
    "make mesh, model and optimizer anew, over the ranks that are left, and load a "
    "checkpoint (torch.distributed.checkpoint.load)"
)


def _with_same_shard(parameter: Any) -> set[int]:
    """Return the ranks that have the same part of a DTensor as this one."""
    mesh = parameter.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return {td.get_rank()}
    same = list(place)
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            same[dim] = slice(None)
    return {*mesh.mesh[tuple(same)].flatten().tolist()}


def _steps(optimizer: torch.optim.Optimizer | None) -> int | None:
    """Return how many steps an optimizer has done; ``None``: it does not count."""
    if optimizer is None:
        return None
    states = list(optimizer.state.values())
    found = [state["step"] for state in states if "step" in state]
    if not found and (states or isinstance(optimizer, torch.optim.SGD)):
        return None
    return int(max(found, default=0))


# -- sending it ------------------------------------------------------------


def _group_of(ranks: tuple[int, ...]) -> Shell:
    """Return the first group of torch of these ranks: that of a module, or a mesh."""
    for group in whole_groups("rejoin"):
        if sorted(td.get_process_group_ranks(group)) == list(ranks):
            return group
    raise ValueError(
        f"rejoin: ranks {list(ranks)} have the same parameters, and there is no group "
        f"of them: make one, dist.new_group({list(ranks)}), at the start of the script"
    )


def _send(
    group: Shell,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    source: int,
) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            td.broadcast(_local(tensor), source, group=group)
    if optimizer is not None:
        _send_state(optimizer, group, source)


def _send_state(optimizer: torch.optim.Optimizer, group: Shell, source: int) -> None:
    is_source = td.get_rank() == source
    described: list[Any] = [None]
    if is_source:
        described[0] = _mapped(optimizer.state_dict(), torch.Tensor, _Shape)
    td.broadcast_object_list(described, source, group=group)
    state = (
        optimizer.state_dict() if is_source else _empty_state(optimizer, described[0])
    )
    found: list[torch.Tensor] = []
    _mapped(state, torch.Tensor, found.append)
    for tensor in found:
        td.broadcast(_local(tensor), source, group=group)
    if not is_source:
        optimizer.load_state_dict(state)


def _local(tensor: Any) -> torch.Tensor:
    """Return what this rank has of a tensor, in the same memory."""
    with torch.no_grad():
        own = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor
    return own.detach()


class _Shape:
    """A tensor as its shape, dtype and kind of device, on this rank."""

    def __init__(self, tensor: torch.Tensor) -> None:
        own = _local(tensor)
        self.shape, self.dtype = tuple(own.shape), own.dtype
        # Each rank has a GPU of its own, which is its current one.
        self.device = own.device.type
        self.is_sharded = hasattr(tensor, "device_mesh")

    def make(self, parameter: Any) -> torch.Tensor:
        """Return such a tensor, sharded as the parameter that it is the state of."""
        own = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if not self.is_sharded:
            return own
        return type(parameter.data).from_local(
            own,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _empty_state(
    optimizer: torch.optim.Optimizer, described: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a state as `described`, to receive tensors into."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]

    def made(key: Any, values: Any) -> Any:
        of = parameters[key] if isinstance(key, int) else None
        return _mapped(values, _Shape, lambda one: one.make(of))

    return {
        key: {one: made(one, values) for one, values in value.items()}
        if key == "state"
        else made(None, value)
        for key, value in described.items()
    }


def _mapped(value: Any, kind: type, change: Any) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(one, kind, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(one, kind, change) for one in value)
    return value


# -- the communication hooks of DDP, some of which keep a state between two steps ------

_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
_POWER_SGD = f"{_TORCH}.powerSGD_hook", "PowerSGDState"
_LOCAL_SGD = f"{_TORCH}.post_localSGD_hook", "PostLocalSGDState"
_MIXED = f"{_TORCH}.mixed_precision_hooks", "_AllreduceUpcastHookState"


def _hooks_of(model: torch.nn.Module) -> tuple[Hook, ...]:
    return tuple(
        Hook(
            name=f"{hook.__module__}.{hook.__qualname__}",
            ranks=tuple(td.get_process_group_ranks(module.process_group)),
            iteration=state.iter if _is_counted(state) else 0,
        )
        for module, hook, state in private.comm_hooks(model)
    )


def _begin_hooks_anew(model: torch.nn.Module, told: Mapping[int, Held]) -> None:
    """Have the states of the hooks be the same on all ranks.

    What PowerSGD remembers is of each rank, and of the buckets that there were: it goes
    on without, as at the start, with passes that it does not compress until there are
    the final buckets.
    """
    for place, (_, hook, state) in enumerate(private.comm_hooks(model)):
        own = told[td.get_rank()].hooks[place]
        latest = max(told[rank].hooks[place].iteration for rank in own.ranks)
        if sharded.is_of(state, _POWER_SGD):
            if state.use_error_feedback or state.warm_start:
                latest = min(latest, state.start_powerSGD_iter - 2)
            for kept in state.error_dict, state.p_memory_dict, state.q_memory_dict:
                kept.clear()
            state.rng.seed(latest)
        if _is_counted(state):
            state.iter = latest
        elif not (
            state is None
            or isinstance(state, td.ProcessGroup)
            or sharded.is_of(state, _MIXED)
        ):
            warnings.warn(
                f"rejoin: the communication hook {hook.__qualname__} has a state, a "
                f"{type(state).__name__}, which stays as it is: see that it is the "
                "same on all ranks",
                stacklevel=5,
            )


def _is_counted(state: Any) -> bool:
    return sharded.is_of(state, _POWER_SGD) or sharded.is_of(state, _LOCAL_SGD)
