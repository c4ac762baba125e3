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
from types import FrameType
from typing import Any

import numpy as np
import torch

from ..collectives import coalescing, data_movement, point_to_point, reductions
from ..collectives.arguments import Place
from ..collectives.data_movement import all_gather_into_tensor
from ..collectives.monitored_barrier import monitored_barrier
from ..groups.dispatch import PendingOp
from ..groups.group_ops import Function, GroupOps
from ..groups.process_group import ProcessGroup
from ..work.composite import completed_work
from ..work.flight_recorder import issued_by
from ..work.op_timeout import op_timeout
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp, make_nccl_premul_sum
from ..work.work import Work
from . import stale
from .meeting import require_members
from .private import c10d, disable_dynamo, in_backward, is_profiling
from .tensors import memories, memory, require_one_order
from .work import BatchedWork, TorchWork

__all__ = ["Ops"]

_KINDS = c10d.ReduceOp.RedOpType
_REDUCE_OPS = {
    int(getattr(_KINDS, op.name)): op
    for op in ReduceOp
    if op is not ReduceOp.PREMUL_SUM and hasattr(_KINDS, op.name)
}
_SUM = _KINDS.SUM
_NOW = timedelta(0)
_STRIDED = torch.strided
#: What has no ``async_op``.
_MESSAGES = point_to_point.isend, point_to_point.irecv
#: The Work of each op that is over when its call returns: a new one took a tenth of it.
_DONE = completed_work(OpType.UNKNOWN, None)
#: Ops in which a tensor has other rows than what it is moved to, or lies on another
#: rank; and how many of their arguments are written.
_BY_ROWS: dict[Function, int] = {
    data_movement.all_gather_into_tensor: 1,
    coalescing.all_gather_into_tensor_coalesced: 1,
    reductions.reduce_scatter_tensor: 1,
    coalescing.reduce_scatter_tensor_coalesced: 1,
    data_movement.all_to_all_single: 1,
    point_to_point.isend: 0,
    point_to_point.irecv: 1,
}


class Ops(GroupOps):
    """The op methods of ``torch.distributed.ProcessGroup``, over a Rankscope group."""

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
        #: Whether the group was rebuilt, or lost ranks.
        self.rebuilt = False
        #: What is from before that, and is refused: see `stale`.
        self.stale: weakref.WeakSet[Any] | tuple[()] = ()
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
        if (
            function is reductions.all_reduce
            and getattr(tensors[0], "layout", _STRIDED) is not _STRIDED
        ):
            _sparse_all_reduce(tensors[0], kwargs["op"], self.group, where)
            return TorchWork(completed_work(OpType.ALL_REDUCE, None), tensors)
        written = _BY_ROWS.get(function)
        if written is not None:
            arrays = [
                *memories(tensors[:written], where, moved=not reduces, rows="written"),
                *memories(tensors[written:], where, moved=not reduces, rows="read"),
            ]
        else:
            arrays = memories(tensors, where, moved=not reduces)
            if function is coalescing.all_gather_coalesced:
                for moved in zip(tensors[1], *tensors[0], strict=False):
                    require_one_order(moved, where)
            # Those of an all_reduce_coalesced are not moved into each other.
            elif len(tensors) > 1:
                require_one_order(tensors, where)
        # Torch waits at once: the caller's thread can do the whole op by itself.
        waits = not getattr(limit, "asyncOp", True)
        if function not in _MESSAGES:
            kwargs["async_op"] = not waits
        call = function
        limit = getattr(limit, "timeout", limit)
        # Without a timeout of its own, torch's options have a negative one.
        if isinstance(limit, timedelta) and limit > _NOW:
            call = functools.partial(_within, op_timeout(limit), call)
        by = _issuer(name, sys._getframe(1)) if in_backward() else ""
        if by:
            call = functools.partial(_within, issued_by(by), call)
        if is_profiling():
            around = torch.profiler.record_function(f"rankscope:{name}")
            call = functools.partial(_within, around, call)
        work = call(*arrays, group=self.group, **kwargs)
        if waits:
            return TorchWork(_DONE, tensors)
        assert work is not None  # this rank is in the group
        kind = BatchedWork if isinstance(work, PendingOp) else TorchWork
        made = kind(work, _written(function, tensors))
        if function is reductions.all_reduce and tensors[0].numel() == 1:
            self._kept.append(made)
        return made

    _issue = _start

    def barrier(self, timeout: Any = None, *, opts: Any = None) -> Any:
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
        self._opened.block.__exit__(None, None, None)
        return TorchWork(self._opened.manager.work)


for _name in dir(GroupOps):
    if not _name.startswith("__") and _name not in ("_issue", "_start"):
        setattr(Ops, _name, disable_dynamo(getattr(Ops, _name)))


def _within(
    around: AbstractContextManager[object], call: Function, *args: Any, **kwargs: Any
) -> Work | None:
    with around:
        return call(*args, **kwargs)


def _reduce_op(op: Any) -> ReduceOp:
    """Return Rankscope's reduction for torch's, which is an object or its kind."""
    if op == _SUM:  # of most ops; what follows takes a twentieth of one
        return ReduceOp.SUM
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


def _written(function: Function, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return what an op writes, as its future has it."""
    if function is point_to_point.isend or not tensors:
        return ()
    if function is data_movement.all_gather:
        return tensors[:1]
    written = tensors[1 if function is data_movement.gather else 0]
    return (written,) if isinstance(written, torch.Tensor) else written or ()


_PACKAGE = __name__.partition(".")[0]
#: The module whose function runs the engine of autograd.
_ENGINE = "torch.autograd.graph"
#: Modules that stand between: they issue nothing of their own.
_BETWEEN = ("torch._dynamo", "torch._compile", "torch.futures")
#: So do torch's decorators, as that of FSDP2's hooks: what they make has this name.
_DECORATED = "wrapper"
#: DDP's reducer issues all_reduces from C++: no function in Python stands between.
_REDUCER_OP, _REDUCER = "all_reduce", "DistributedDataParallel.backward"


def _issuer(op: str, frame: FrameType | None) -> str:
    """Return what issues the op in which `frame` is; empty: the user.

    In a backward pass, where the user's line shows only ``backward()``, that is what
    autograd has called: a hook of DDP or FSDP, or the backward of a function; with
    nothing in Python, DDP itself.
    """
    called = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == _ENGINE:
            if called:
                return called
            return _REDUCER if op == _REDUCER_OP else "backward()"
        package = module.partition(".")[0]
        if package == "torch":
            code = frame.f_code
            if code.co_name != _DECORATED and not module.startswith(_BETWEEN):
                called = getattr(code, "co_qualname", code.co_name)  # 3.11 and later
        elif package != _PACKAGE:
            return ""
        frame = frame.f_back
    return ""


def _sparse_all_reduce(
    tensor: torch.Tensor, op: ReduceOp, group: ProcessGroup, where: object
) -> None:
    """Add up `tensor` over all ranks, in place; it becomes coalesced.

    As torch's gloo does: patterns differ from rank to rank. Entries and their number
    are gathered by three collectives, one after the other.

    Raises `ValueError` for another reduction than SUM, for another layout than COO, and
    on all ranks where they have tensors of different shapes.
    """
    if op is not ReduceOp.SUM:
        raise ValueError(f"{where}: op is {op.name}; sparse tensors can be summed only")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(
            f"{where}: the layout of the tensor is {tensor.layout}; expected "
            "torch.sparse_coo: pass x.to_sparse_coo()"
        )
    own = tensor.detach().coalesce()
    ranks, dims = group.size(), own.sparse_dim()
    told = np.array([own._nnz(), dims, *own.shape], np.int64)
    found = np.empty((ranks, len(told)), np.int64)
    all_gather_into_tensor(found, told, group)
    counts, shapes = found[:, 0], found[:, 1:]
    for rank in np.flatnonzero((shapes != shapes[0]).any(1))[:1]:
        had = [
            f"rank {one} has shape {tuple(shapes[one, 1:].tolist())}, of which "
            f"{shapes[one, 0]} sparse dimensions"
            for one in (0, rank)
        ]
        raise ValueError(f"{where}: {', '.join(had)}; expected the same on every rank")
    # An all_gather has one size on all ranks: the shorter ones are filled up.
    longest = int(counts.max())
    indices = own.indices().new_zeros((longest, dims))
    indices[: own._nnz()] = own.indices().t()
    values = own.values().new_zeros((longest, *own.values().shape[1:]))
    values[: own._nnz()] = own.values()
    all_indices = indices.new_empty((ranks, *indices.shape))
    all_values = values.new_empty((ranks, *values.shape))
    for output, part in (all_indices, indices), (all_values, values):
        all_gather_into_tensor(
            memory(output, where, moved=True), memory(part, where, moved=True), group
        )
    here = [slice(int(count)) for count in counts]
    total = torch.sparse_coo_tensor(
        torch.cat([part[one] for part, one in zip(all_indices, here, strict=True)]).t(),
        torch.cat([part[one] for part, one in zip(all_values, here, strict=True)]),
        tensor.shape,
    ).coalesce()
    tensor.copy_(total)
