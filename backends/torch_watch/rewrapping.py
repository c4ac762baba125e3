"""A ``DistributedDataParallel`` model over the group that replaces its own."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import DistError
from .creation import is_registered, made_of

__all__ = ["rewrap"]

_MIB = 1024 * 1024


def rewrap(model: Any) -> Any:
    """Return a new ``DistributedDataParallel`` around the module of `model`.

    After a rebuild of its group, `model` itself trains on: this is for models whose
    group was destroyed and made again by hand, and for a fresh reducer. Every rank of
    the group must call it.

    Parameters
    ----------
    model
        A ``torch.nn.parallel.DistributedDataParallel``. It must not be used any more:
        its gradients are not reduced.

    Returns
    -------
    DistributedDataParallel
        With the options and communication hooks of `model`, and the same module: its
        parameters, and so the optimizer, stay valid. Rank 0's parameters and buffers
        are sent to the others, as at any construction.

    Raises
    ------
    TypeError
        Where `model` is no ``DistributedDataParallel``.
    DistError
        Where the group is aborted: rebuild it first.
    """
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "rewrap takes a torch.nn.parallel.DistributedDataParallel, not a "
            f"{type(model).__name__}; other modules use the rebuilt group by themselves"
        )
    if model._delay_all_reduce_params:
        raise DistError(
            "rewrap: the hook of delay_all_reduce_named_params is not known any more; "
            "write DistributedDataParallel(model.module, …) with it"
        )
    group = _group_of(model)
    options = _options(model, DistributedDataParallel)
    # Else the gradients were reduced by both.
    model._remove_autograd_hooks()
    made = DistributedDataParallel(model.module, process_group=group, **options)
    for hook, state in model._comm_hooks:
        made.register_comm_hook(state, hook)
    return made.train(model.training)


def _group_of(model: Any) -> Any:
    """Return the group to use: that of `model`, or the default one if it is gone."""
    from torch.distributed import distributed_c10d

    group = model.process_group
    if not is_registered(group):
        if not distributed_c10d.is_initialized():
            raise DistError(
                "rewrap: there is no group of torch; make one by "
                "dist.init_process_group() first"
            )
        if group.size() != distributed_c10d.get_world_size():
            raise DistError(
                f"rewrap: the group {group.group_desc!r} of the model was destroyed; "
                "make it anew, then DistributedDataParallel(model.module, "
                "process_group=…)"
            )
        group = distributed_c10d._get_default_group()
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
    config = known.get("_bucket_config")
    if config is None:
        # torch before 2.13
        if not known["bucket_bytes_cap_default"]:
            options["bucket_cap_mb"] = known["bucket_bytes_cap"] / _MIB
    elif config.per_bucket_bytes_caps:
        caps = config.per_bucket_bytes_caps
        options["bucket_cap_mb_list"] = [one / _MIB for one in caps]
    elif config.first_bucket_bytes_cap == config.bucket_bytes_cap:
        options["bucket_cap_mb"] = config.bucket_bytes_cap / _MIB
    return options
