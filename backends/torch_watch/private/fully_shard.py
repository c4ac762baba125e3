"""The private names of the modules of torch's ``fully_shard``."""

from __future__ import annotations

from typing import Any

__all__ = ["FullyShardNames"]


class FullyShardNames:
    """The private names of a module that ``fully_shard`` was applied to.

    Parameters
    ----------
    module
        An ``FSDPModule`` of torch.
    """

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
