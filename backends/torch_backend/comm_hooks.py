"""The communication hooks of DDP, some of which keep a state between two steps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as td

from . import private, sharded
from .agreement import Held, Hook

__all__ = ["begin_anew", "hooks_of"]

_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
_POWER_SGD = f"{_TORCH}.powerSGD_hook", "PowerSGDState"
_LOCAL_SGD = f"{_TORCH}.post_localSGD_hook", "PostLocalSGDState"
_MIXED = f"{_TORCH}.mixed_precision_hooks", "_AllreduceUpcastHookState"


def hooks_of(model: torch.nn.Module) -> tuple[Hook, ...]:
    """Return what a rank tells of the hooks of the DDP modules in `model`."""
    return tuple(
        Hook(
            name=f"{hook.__module__}.{hook.__qualname__}",
            ranks=tuple(td.get_process_group_ranks(module.process_group)),
            iteration=state.iter if _is_counted(state) else 0,
        )
        for module, hook, state in private.comm_hooks(model)
    )


def begin_anew(model: torch.nn.Module, told: Mapping[int, Held]) -> None:
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
