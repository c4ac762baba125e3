"""The private names of torch's ``DistributedDataParallel`` and ``fully_shard``."""

from __future__ import annotations

from typing import Any

__all__ = ["DataParallelNames", "FullyShardNames"]

_MIB = 1024 * 1024


class DataParallelNames:
    """The private names of a ``DistributedDataParallel`` module."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def is_made(self) -> bool:
        """Whether its construction has succeeded."""
        return "reducer" in vars(self._model)

    def move(self, group: Any) -> bool:
        """Have the module use `group`; return whether this torch can do that.

        The reducer holds its group in C++: that reference cannot be replaced.
        """
        if not hasattr(self._model, "_update_process_group"):
            return False
        self._model._update_process_group(group)
        return True

    @property
    def delays_reductions(self) -> bool:
        """Whether it was made with ``delay_all_reduce_named_params``."""
        return bool(self._model._delay_all_reduce_params)

    @property
    def hooks(self) -> list[tuple[Any, Any]]:
        """The communication hooks, each with its state."""
        return list(self._model._comm_hooks)

    def remove_hooks(self) -> None:
        """Stop the reduction of its gradients."""
        self._model._remove_autograd_hooks()

    def bucket_options(self) -> dict[str, Any]:
        """Return the arguments that made the sizes of its buckets."""
        known = vars(self._model)
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


class FullyShardNames:
    """The private names of a module that ``fully_shard`` was applied to."""

    def __init__(self, module: Any) -> None:
        self._state = module._get_fsdp_state()

    @property
    def is_root(self) -> bool:
        """Whether a step began in this module, and not in one that contains it."""
        return bool(self._state._is_root)

    def groups(self) -> list[Any]:
        """Return the groups of its mesh and of those of the modules in it."""
        return [
            group
            for state in self._state._state_ctx.all_states
            for parameters in state._fsdp_param_groups
            for group in parameters.mesh_info.mesh.get_all_groups()
        ]
