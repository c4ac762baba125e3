"""Models whose parameters are sharded, after an abort has ended a step of theirs."""

from __future__ import annotations

import sys
from typing import Any

from .holders import objects
from .private.fully_shard import FullyShardNames

__all__ = ["reset"]


def reset(group: Any) -> list[str]:
    """Bring the models over `group` to the state between two steps.

    An abort ends the step on the ranks at different places. A rank that has gathered
    its parameters, and one that has not, would issue different ops in the next step.

    Returns
    -------
    list of str
        The models that torch cannot reset.
    """
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    if torch_fsdp is None:
        return []
    fsdp1 = torch_fsdp.FullyShardedDataParallel
    # torch before 2.6 has no `fully_shard` there.
    fsdp2 = getattr(torch_fsdp, "FSDPModule", ())
    found = [
        _first_version(one, group)
        if issubclass(type(one), fsdp1)
        else _reset(one, group)
        for one in objects(lambda kind: issubclass(kind, (fsdp1, fsdp2)))
    ]
    return [sentence for sentence in found if sentence]


def _reset(module: Any, group: Any) -> str:
    """Reset a module of ``fully_shard``; return a sentence where torch cannot."""
    private = FullyShardNames(module)
    if not private.is_root or group not in private.groups():
        return ""
    if not hasattr(module, "reset_iter_state"):
        return (
            "a model of fully_shard (a step that the abort ended cannot be undone in "
            "this torch: make the model anew, then new.load_state_dict("
            "model.state_dict()))"
        )
    try:
        module.reset_iter_state()
    except RuntimeError as error:
        return (
            f"a model of fully_shard (it was not reset: {error}; make it anew, then "
            "new.load_state_dict(model.state_dict()))"
        )
    return ""


def _first_version(module: Any, group: Any) -> str:
    """Return a sentence on a ``FullyShardedDataParallel`` over `group`."""
    if vars(module).get("process_group") is not group:
        return ""
    return (
        "a FullyShardedDataParallel (where the abort ended a step of it, make it anew: "
        "model = FullyShardedDataParallel(...))"
    )
