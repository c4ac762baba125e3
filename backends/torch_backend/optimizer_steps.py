"""Steps of optimizers that an error has cut short, such as an interrupt.

Some of the parameters are of the step before, then, and others are not. The optimizer
may count the step as done.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = ["forget", "install", "is_cut_short"]

#: Of each optimizer in a step with a closure, how often its tensors had been written
#: before; of others -1.
_writes: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
    weakref.WeakKeyDictionary()
)


@functools.cache
def install() -> None:
    """Note the steps of all optimizers; later calls do nothing."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)


def is_cut_short(model: torch.nn.Module) -> bool:
    """Return whether a part of the parameters, or of their state, has been written.

    An error in the closure of a step, as of Lightning, came before.
    """
    return any(_count(one) != _writes[one] for one in _in_step(model))


def forget(model: torch.nn.Module) -> None:
    """Forget the steps that were cut short: the model is of one step again."""
    for one in _in_step(model):
        del _writes[one]


def _in_step(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    own = set(model.parameters())
    return [
        one
        for one in _writes
        if any(not own.isdisjoint(group["params"]) for group in one.param_groups)
    ]


def _begin(optimizer: torch.optim.Optimizer, given: Any, named: Any) -> None:
    if not torch.compiler.is_compiling():
        # Counting takes 3 % of a step of Adam.
        has_closure = len(given) > 1 or "closure" in named
        _writes[optimizer] = _count(optimizer) if has_closure else -1


def _end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _writes.pop(optimizer, None)


def _count(optimizer: torch.optim.Optimizer) -> int:
    """Return how often the parameters and the tensors of the state were written."""
    tensors = [one for group in optimizer.param_groups for one in group["params"]]
    for state in optimizer.state.values():
        tensors += [one for one in state.values() if isinstance(one, torch.Tensor)]
    return sum([one._version for one in tensors])
