"""The models that keep state of a pass, or parts of a model, with their private names.

FSDP, tensor parallelism, pipelines and ZeRO are modules of torch that a program may not
have imported: who has an object of theirs has done so, and nothing is imported here.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

__all__ = [
    "FSDP1",
    "SCHEDULE",
    "ZERO",
    "end_pass",
    "is_of",
    "is_parameters",
    "lost_ranks",
    "overlaps",
    "parameter_groups",
    "reset_fully_sharded",
    "reset_schedule",
    "schedules",
    "stages",
    "users",
]

FSDP1 = (
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "FullyShardedDataParallel",
)
ZERO = "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"
SCHEDULE = "torch.distributed.pipelining.schedules", "_PipelineSchedule"
# What gathers and reduces the parameters of a module of FSDP2.
_PARAMETERS = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "FSDPParamGroup",
)
# The modules of torch with one of these have DTensors, too, if any has.
_DTENSOR = "torch.distributed.tensor", "DTensor"


def is_of(one: Any, where: tuple[str, str]) -> bool:
    """Return whether `one` is an instance of a class of torch, by its module."""
    module, name = where
    return module in sys.modules and isinstance(one, getattr(sys.modules[module], name))


def overlaps(optimizer: Any) -> bool:
    """Return whether an optimizer of ZeRO steps while DDP reduces gradients."""
    return is_of(optimizer, ZERO) and optimizer._overlap_with_ddp


def is_parameters(one: Any) -> bool:
    """Return whether `one` gathers and reduces parameters of FSDP2."""
    return is_of(one, _PARAMETERS)


def users() -> dict[Any, list[Any]]:
    """Return the live objects that issue ops of a model, each with torch's groups.

    They are the `FSDPParamGroup` of FSDP2, modules of FSDP1 and those with DTensors,
    ZeRO's optimizers, and schedules of pipelines; not `DistributedDataParallel`. Takes
    some 100 ms, where torch has been asked for one of these.
    """
    kinds = tuple(
        getattr(sys.modules[module], name)
        for module, name in (FSDP1, ZERO, SCHEDULE, _PARAMETERS)
        if module in sys.modules
    )
    if _DTENSOR[0] in sys.modules:
        kinds += (torch.nn.Module,)
    if not kinds:
        return {}
    known: dict[type, bool] = {}
    found = {}
    for one in gc.get_objects():
        kind = type(one)
        if kind not in known:
            known[kind] = issubclass(kind, kinds)
        if known[kind]:
            # None stands for the default group.
            groups = [each or torch.distributed.group.WORLD for each in _groups_of(one)]
            if groups:
                found[one] = groups
    return found


def _groups_of(one: Any) -> list[Any]:
    if is_of(one, FSDP1) or is_of(one, ZERO):
        return [vars(one).get("process_group")]
    if is_of(one, SCHEDULE):
        return [stage.group for stage in stages(one)]
    if is_parameters(one):
        meshes = [one.mesh_info.mesh]
    else:
        # A module that is being made has none yet.
        parameters = vars(one).get("_parameters", {}).values()
        meshes = [
            each.device_mesh for each in parameters if hasattr(each, "device_mesh")
        ]
    return [group for mesh in meshes for group in _groups_of_mesh(mesh)]


def _groups_of_mesh(mesh: Any) -> list[Any]:
    if mesh.get_coordinate() is None:
        return []  # this rank is not in it
    try:
        return list(mesh.get_all_groups())
    except TypeError:
        # Torch 2.7 finds those of a mesh that has lost ranks no more: nor do its ops.
        return []


def lost_ranks(parameter: Any) -> Any:
    """Return the mesh of a sharded parameter, if it has lost ranks; else ``None``.

    In a DistributedDataParallel such parameters are ordinary ones between its passes.
    """
    info = getattr(parameter, "_st_info", None)
    mesh: Any = getattr(parameter, "device_mesh", None) if info is None else info.mesh
    place: Any = None if mesh is None else mesh.get_coordinate()
    for dim in range(0 if place is None else mesh.ndim):
        line = [*place[:dim], slice(None), *place[dim + 1 :]]
        known = torch.distributed.get_process_group_ranks(mesh.get_group(dim))
        if sorted(known) != sorted(mesh.mesh[tuple(line)].tolist()):
            return mesh
    return None


def stages(schedule: Any) -> list[Any]:
    own = vars(schedule)
    return list(own["_stages"]) if "_stages" in own else [own["_stage"]]


def schedules(model: torch.nn.Module) -> list[Any]:
    """Return the live schedules of pipelines with a stage that is of `model`."""
    if SCHEDULE[0] not in sys.modules:
        return []
    parts = set(model.modules())
    return [
        one
        for one in users()
        if is_of(one, SCHEDULE) and any(each.submod in parts for each in stages(one))
    ]


def reset_schedule(schedule: Any) -> None:
    """Have a schedule be as before its first step, as it is in a fresh process."""
    for name in vars(schedule):
        if name.endswith("_initialized"):
            setattr(schedule, name, False)
    _clear(schedule, "_internal_losses")
    for stage in stages(schedule):
        _clear(stage, "fwd_cache", "bwd_cache", "output_chunks")
        _clear(stage, "backward_state", "dw_runner")
        stage.grad_send_info = None


def parameter_groups(module: torch.nn.Module) -> list[Any]:
    """Return what gathers and reduces the parameters of a module of FSDP2."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state: Any = module._get_fsdp_state()
    # One before torch 2.11.
    groups = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if groups is None else groups
    return [one for one in found if one is not None]


def end_pass(parameters: Any) -> None:
    """Have the next pass of a module of FSDP2 begin by gathering its `parameters`.

    Within a pass that failed it would not, up to torch 2.7 at least.
    """
    for module in parameters.modules:
        state: Any = module._get_fsdp_state()
        state._training_state = type(state._training_state).IDLE


def reset_fully_sharded(model: torch.nn.Module) -> None:
    """Have the modules of FSDP2 in `model` be as between two steps.

    A pass that failed leaves gathered parameters, which the next one would use after a
    checkpoint was loaded, their gradients, to which it would add, and the note that
    its end is queued, without which no gradient of the next one is reduced.
    """
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state: Any = module._get_fsdp_state()
        idle = type(state._training_state).IDLE
        state._training_state = idle
        _clear(state, "_modules_to_run_forward")
        _clear(state._state_ctx, "iter_forward_root")
        state._state_ctx.post_backward_final_callback_queued = False
        _clear(state._comm_ctx, *_IN_PASS)
        for group in parameter_groups(module):
            group._training_state = idle
            _clear(group, *_IN_PASS)
            for one in group.fsdp_params:
                one.unsharded_accumulated_grad = None
                if hasattr(one, "_unsharded_param"):
                    one._unsharded_param.grad = None
            group._to_sharded()


#: What FSDP2 keeps during a pass; not every version has them all.
_IN_PASS = (
    "all_gather_state",
    "reduce_scatter_state",
    "reduce_scatter_states",
    "post_forward_order",
    "_last_post_reduce_events",
    "_post_forward_indices",
    "_all_gather_result",
    "_post_reduce_event",
    "_reshard_after_forward_event",
    "_partial_reduce_output",
    "_all_reduce_state",
)


def _clear(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, (list, set, dict)):
            value.clear()
        elif value is not None:
            setattr(owner, name, None)
