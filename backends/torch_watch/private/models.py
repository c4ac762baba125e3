"""The private names of torch's ``DistributedDataParallel`` and ``fully_shard``."""

from __future__ import annotations

from typing import Any

__all__ = [
    "bucket_options",
    "delays_reductions",
    "hooks_of",
    "is_made",
    "move_model",
    "remove_hooks",
    "root_groups",
]

_MIB = 1024 * 1024


def is_made(model: Any) -> bool:
    return "reducer" in vars(model)


def move_model(model: Any, group: Any) -> bool:
    """Have the model use `group`; return whether this torch can do that.

    The reducer holds its group in C++: that reference cannot be replaced.
    """
    if not hasattr(model, "_update_process_group"):
        return False
    model._update_process_group(group)
    return True


def delays_reductions(model: Any) -> bool:
    return bool(model._delay_all_reduce_params)


def hooks_of(model: Any) -> list[tuple[Any, Any]]:
    return list(model._comm_hooks)


def remove_hooks(model: Any) -> None:
    """Stop the reduction of the gradients of the model."""
    model._remove_autograd_hooks()


def bucket_options(model: Any) -> dict[str, Any]:
    """Return the arguments that made the sizes of the buckets of the model."""
    known = vars(model)
    config = known.get("_bucket_config")
    if config is None:
        # torch before 2.13
        if known["bucket_bytes_cap_default"]:
            return {}
        return {"bucket_cap_mb": known["bucket_bytes_cap"] / _MIB}
    if config.per_bucket_bytes_caps:
        caps = config.per_bucket_bytes_caps
        return {"bucket_cap_mb_list": [one / _MIB for one in caps]}
    if config.first_bucket_bytes_cap == config.bucket_bytes_cap:
        return {"bucket_cap_mb": config.bucket_bytes_cap / _MIB}
    return {}


def root_groups(module: Any) -> list[Any]:
    """Return the groups of a model of ``fully_shard``; none of a module within it."""
    state = module._get_fsdp_state()
    if not state._is_root:
        return []
    return [
        group
        for one in state._state_ctx.all_states
        for parameters in one._fsdp_param_groups
        for group in parameters.mesh_info.mesh.get_all_groups()
    ]
