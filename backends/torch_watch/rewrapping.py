"""A ``DistributedDataParallel`` model over the group that replaces its own."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import DistError
from .creation import made_of
from .private.groups import names
from .private.models import (
    bucket_options,
    delays_reductions,
    hooks_of,
    remove_hooks,
)

__all__ = ["rewrap"]


def rewrap(model: Any) -> Any:
    """Return a new ``DistributedDataParallel`` around the module of `model`.

    After a rebuild of its group, `model` itself trains on: this is for models whose
    group was destroyed and made again by hand, and for a fresh reducer. Every rank of
    the group must call it.

    Parameters
    ----------
    model : torch.nn.parallel.DistributedDataParallel
        It must not be used any more: its gradients are not reduced.

    Returns
    -------
    DistributedDataParallel
        With the options and communication hooks of `model`, and the same module: its
        parameters, and so the optimizer, stay valid. Rank 0's parameters and buffers
        are sent to the others, as at any construction.

    Raises
    ------
    TypeError
        `model` is no ``DistributedDataParallel``.
    DistError
        The group is aborted: rebuild it first; or the hook of
        ``delay_all_reduce_named_params`` is not known any more.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "rewrap takes a torch.nn.parallel.DistributedDataParallel, not a "
            f"{type(model).__name__}; other modules use the rebuilt group by themselves"
        )
    if delays_reductions(model):
        raise DistError(
            "rewrap: the hook of delay_all_reduce_named_params is not known any more; "
            "write DistributedDataParallel(model.module, …) with it"
        )
    group = _group_of(model)
    options = _options(model, DistributedDataParallel)
    # Else the gradients were reduced by both.
    remove_hooks(model)
    made = DistributedDataParallel(model.module, process_group=group, **options)
    for hook, state in hooks_of(model):
        made.register_comm_hook(state, hook)
    return made.train(model.training)


def _group_of(model: Any) -> Any:
    """Return the group to use: that of `model`, or the default one if it is gone."""
    torch = names()
    group = model.process_group
    if not torch.has(group):
        if not torch.c10d.is_initialized():
            raise DistError(
                "rewrap: there is no group of torch; make one by "
                "dist.init_process_group() first"
            )
        if group.size() != torch.c10d.get_world_size():
            raise DistError(
                f"rewrap: the group {group.group_desc!r} of the model was destroyed; "
                "make it anew, then DistributedDataParallel(model.module, "
                "process_group=…)"
            )
        group = torch.default
    reason = made_of(group).aborted
    if reason is not None:
        raise DistError(
            f"rewrap: the group {group.group_desc!r} of the model is aborted "
            f"({reason}); %dist_rebuild first"
        )
    return group


def _options(model: Any, kind: type) -> dict[str, Any]:
    """Return the arguments of `kind` that made `model`, as its attributes have them."""
    known = vars(model)
    options = {
        name: known[name]
        for name in inspect.signature(kind).parameters
        if name in known and name not in ("module", "process_group", "device_mesh")
    }
    if options.get("device_ids") is None:
        options.pop("output_device", None)
    return options | bucket_options(model)
