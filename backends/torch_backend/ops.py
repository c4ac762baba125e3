"""The ops of torch's process groups, each by a collective of a Rankscope group."""

from __future__ import annotations

import collections
import functools
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from ..collectives import coalescing, data_movement, point_to_point, reductions
from ..collectives.arguments import Place
from ..collectives.monitored_barrier import monitored_barrier
from ..groups.group_ops import Function, GroupOps
from ..groups.process_group import ProcessGroup
from ..work.composite import completed_work
from ..work.flight_recorder import issued_by
from ..work.op_timeout import op_timeout
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp, make_nccl_premul_sum
from ..work.work import Work
from . import stale
from .issuers import issuer
from .meeting import require_members
from .private import c10d, disable_dynamo, in_backward, is_profiling
from .sparse import sparse_all_reduce
from .tensors import memories, require_one_order, row_memory
from .work import BatchedWork, TorchWork

__all__ = ["Ops"]

_KINDS = c10d.ReduceOp.RedOpType
_REDUCE_OPS = {
    int(getattr(_KINDS, op.name)): op
    for op in ReduceOp
    if op is not ReduceOp.PREMUL_SUM and hasattr(_KINDS, op.name)
}
_NOW = timedelta(0)


class Ops(GroupOps):
    """The op methods of ``torch.distributed.ProcessGroup``, over `group`.

    They are those of a Rankscope group, for tensors and with torch's options.
    """

    #: The group that does the ops.
    group: ProcessGroup

    def __init__(self) -> None:
        # DDP's join and its forward pass keep C++'s half of a Work alone, which waits
        # for ever without the half in Python. Those are all_reduces of one number.
        self._kept: collections.deque[TorchWork] = collections.deque(maxlen=64)
        # The batch of each thread: others may issue ops meanwhile, and batches.
        self._opened: Any = threading.local()
        # The last generation in which all ranks were seen to have the group.
        self._complete = 0
        #: What is from before the group was rebuilt, and is refused: see `stale`.
        self.stale: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Whether a module that is not among them has issued an op since.
        self.passes = False

    def _start(
        self, function: Function, limit: Any, *tensors: Any, **kwargs: Any
    ) -> Any:
        name = function.__name__
        if self.group.generation != self._complete:
            require_members(self.group, name)
            self._complete = self.group.generation
        if self.stale:
            stale.refuse(self, name, sys._getframe(1))
        where = Place(name, self.group)
        reduces = "op" in kwargs
        if reduces:
            kwargs["op"] = _reduce_op(kwargs["op"])
        if function is reductions.all_reduce and _is_sparse(tensors[0]):
            sparse_all_reduce(tensors[0], kwargs["op"], self.group, where)
            return TorchWork(completed_work(OpType.ALL_REDUCE, None), tensors)
        if function is data_movement.all_to_all_single:
            arrays = [row_memory(tensor, where) for tensor in tensors]
        else:
            arrays = memories(tensors, where, moved=not reduces)
            # The tensors of a coalesced op are not moved into each other.
            if len(tensors) > 1 and "coalesced" not in name:
                require_one_order(tensors, where)
        # Torch waits at once: the caller's thread can do the whole op by itself.
        batched = self.group.capturing
        waits = not batched and not getattr(limit, "asyncOp", True)
        if waits:
            kwargs["async_op"] = False
        call = functools.partial(function, *arrays, group=self.group, **kwargs)
        limit = getattr(limit, "timeout", limit)
        # Without a timeout of its own, torch's options have a negative one.
        if isinstance(limit, timedelta) and limit > _NOW:
            call = functools.partial(_within, op_timeout(limit), call)
        by = issuer(name, sys._getframe(1)) if in_backward() else ""
        if by:
            call = functools.partial(_within, issued_by(by), call)
        if is_profiling():
            around = torch.profiler.record_function(f"rankscope:{name}")
            call = functools.partial(_within, around, call)
        work = call()
        if waits:
            return TorchWork(completed_work(OpType.UNKNOWN, None), tensors)
        assert work is not None  # this rank is in the group
        kind = BatchedWork if batched else TorchWork
        made = kind(work, _written(function, tensors))
        if function is reductions.all_reduce and tensors[0].numel() == 1:
            self._kept.append(made)
        return made

    def barrier(self, timeout: Any = None, *, opts: Any = None) -> Any:
        """Wait for all ranks."""
        # Not on the device that torch's options name, which may be an accelerator.
        return self._issue(data_movement.barrier, timeout if opts is None else opts)

    def monitored_barrier(
        self, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; the error names those that do not come."""
        limit = getattr(timeout, "timeout", timeout)
        monitored_barrier(self.group, limit, wait_all_ranks)

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Begin a batch: ops of this thread are issued by `_end_coalescing`."""
        self._opened.block = coalescing.coalescing_manager(self.group, async_ops=True)
        self._opened.manager = self._opened.block.__enter__()

    def _end_coalescing(self, device: torch.device | None = None) -> TorchWork:
        """Issue the batch; return its Work."""
        self._opened.block.__exit__(None, None, None)
        return TorchWork(self._opened.manager.work)


for _name in dir(GroupOps):
    if not _name.startswith("__") and _name not in ("_issue", "_start"):
        setattr(Ops, _name, disable_dynamo(getattr(Ops, _name)))


def _within(around: AbstractContextManager[object], call: Function) -> Work | None:
    with around:
        return call()


def _reduce_op(op: Any) -> ReduceOp:
    """Return Rankscope's reduction for torch's, which is an object or its kind."""
    if isinstance(op, ReduceOp):
        return op
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


def _is_sparse(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided


def _written(function: Function, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return what an op writes, as its future has it."""
    if function is point_to_point.isend or not tensors:
        return ()
    if function is data_movement.all_gather:
        return tensors[:1]
    written = tensors[1 if function is data_movement.gather else 0]
    return (written,) if isinstance(written, torch.Tensor) else written or ()
