"""The arguments of the methods of torch's process groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from ..work.op_timeout import op_timeout
from ..work.reduce_op import ReduceOp, make_nccl_premul_sum
from ..work.work import Work
from .private import c10d

__all__ = [
    "Tensor",
    "Tensors",
    "Timeout",
    "field_of",
    "limited",
    "one_list",
    "one_tensor",
    "reduce_op_in",
]

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[Tensor]
Timeout: TypeAlias = timedelta | None

_KINDS = c10d.ReduceOp.RedOpType
_REDUCE_OPS = {
    int(getattr(_KINDS, op.name)): op
    for op in ReduceOp
    if op is not ReduceOp.PREMUL_SUM and hasattr(_KINDS, op.name)
}
_NOW = timedelta(0)


def reduce_op_in(opts: Any, given: Any = None) -> ReduceOp:
    """Return Rankscope's reduction for that of an op's options, or the one given.

    Torch's is an object or its kind.
    """
    op = field_of(opts, "reduceOp", given, c10d.ReduceOp.SUM)
    found = _REDUCE_OPS.get(int(getattr(op, "op", op)))
    if found is not None:
        return found
    if op == c10d.ReduceOp.PREMUL_SUM:
        # As older versions of torch have no `factor`.
        _, factor = op.__getstate__()
        return make_nccl_premul_sum(
            factor.item() if isinstance(factor, torch.Tensor) else factor
        )
    raise ValueError(f"the backend rankscope has no reduction {op}")


def one_tensor(tensors: Tensors | Tensor) -> Tensor:
    """Return the one tensor of a rank, which torch puts into a list."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"got {len(tensors)} tensors; expected one on each rank")
    return tensors[0]


def one_list(lists: Sequence[Tensors] | Tensors) -> Tensors:
    """Return the one list of tensors of a rank, which torch puts into a list."""
    if lists and not isinstance(lists[0], torch.Tensor):
        return _one_of(lists)
    return lists


def _one_of(lists: Sequence[Any]) -> Tensors:
    if len(lists) != 1:
        raise ValueError(f"got {len(lists)} lists of tensors; expected one")
    return lists[0]


def field_of(opts: Any, name: str, given: Any, default: Any) -> Any:
    """Return a field of an op's options, or what is given in their place."""
    if given is not None:
        return given
    if opts is None or isinstance(opts, timedelta):
        return default
    return getattr(opts, name, opts)


def limited(call: Callable[[], Work | None], limit: Any) -> Work | None:
    """Start an op with the timeout `limit`, if that is one."""
    # Without a timeout of its own, torch's options have a negative one.
    if isinstance(limit, timedelta) and limit > _NOW:
        with op_timeout(limit):
            return call()
    return call()
