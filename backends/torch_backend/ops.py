"""The ops of torch's process groups, each by a collective of a Rankscope group."""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..collectives import coalescing, data_movement, point_to_point, reductions
from ..collectives.arguments import Place
from ..collectives.monitored_barrier import monitored_barrier
from ..groups.process_group import ProcessGroup
from ..work.composite import completed_work
from ..work.flight_recorder import issued_by
from ..work.op_type import OpType
from ..work.work import Work
from .arguments import (
    Tensor,
    Tensors,
    Timeout,
    field_of,
    limited,
    one_list,
    one_tensor,
    reduce_op_in,
)
from .issuers import issuer
from .meeting import require_members
from .private import disable_dynamo, is_profiling
from .sparse import sparse_all_reduce
from .tensors import memories, memory, row_memory
from .work import BatchedWork, TorchWork

__all__ = ["Ops"]


def _issued_by(name: str, call: Callable[[], Work | None]) -> Work | None:
    with issued_by(name):
        return call()


class Ops:
    """The op methods of ``torch.distributed.ProcessGroup``, over `group`.

    Their arguments are those of c10d: a tensor of a rank stands in a list, or alone,
    and `opts` are c10d's options, or the value of the field that stands in their place.
    """

    #: The group that does the ops.
    group: ProcessGroup

    def __init__(self) -> None:
        # DDP's join and its forward pass keep C++'s half of a Work alone, which waits
        # for ever without the half in Python. Those are all_reduces of one number.
        self._kept: collections.deque[TorchWork] = collections.deque(maxlen=64)
        self._batch: Any = None
        # The last generation in which all ranks were seen to have the group.
        self._complete = 0

    # -- starting an op ------------------------------------------------------------

    def _where(self, name: str) -> Place:
        if self.group.generation != self._complete:
            require_members(self.group, name)
            self._complete = self.group.generation
        return Place(name, self.group)

    def _issue(
        self,
        function: Callable[..., Work | None],
        *arguments: Any,
        opts: Any = None,
        timeout: Timeout = None,
        outputs: Sequence[Any] = (),
        **named: Any,
    ) -> TorchWork:
        """Start an op; `outputs` are the tensors that its future has."""
        call = functools.partial(function, *arguments, group=self.group, **named)
        by = issuer(sys._getframe(1))
        if by:
            call = functools.partial(_issued_by, by, call)
        limit = timeout or getattr(opts, "timeout", opts)
        work: Work | None
        if is_profiling():
            with torch.profiler.record_function(f"rankscope:{function.__name__}"):
                work = limited(call, limit)
        else:
            work = limited(call, limit)
        assert work is not None  # this rank is in the group
        made = TorchWork if self._batch is None else BatchedWork
        return made(work, outputs)

    # -- reductions ------------------------------------------------------------

    @disable_dynamo
    def allreduce(
        self,
        tensors: Tensors | Tensor,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        op: Any = None,
    ) -> TorchWork:
        """Reduce a tensor over all ranks, in place; a sparse one, too."""
        tensor = one_tensor(tensors)
        where = self._where("all_reduce")
        reduce_op = reduce_op_in(opts, op)
        if tensor.layout is not torch.strided:
            sparse_all_reduce(tensor, reduce_op, self.group, where)
            return TorchWork(completed_work(OpType.ALL_REDUCE, None), [tensor])
        made = self._issue(
            reductions.all_reduce,
            memory(tensor, where),
            reduce_op,
            async_op=True,
            opts=opts,
            timeout=timeout,
            outputs=(tensor,),
        )
        if tensor.numel() == 1:
            self._kept.append(made)
        return made

    @disable_dynamo
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        """Reduce each tensor over all ranks, as one batch."""
        where = self._where("all_reduce_coalesced")
        return self._issue(
            coalescing.all_reduce_coalesced,
            memories(tensors, where),
            reduce_op_in(opts),
            async_op=True,
            opts=opts,
            outputs=tensors,
        )

    @disable_dynamo
    def reduce(
        self,
        tensors: Tensors | Tensor,
        opts: Any = None,
        op: Any = None,
        timeout: Timeout = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Reduce a tensor over all ranks into that of the root."""
        tensor = one_tensor(tensors)
        return self._issue(
            reductions.reduce,
            memory(tensor, self._where("reduce")),
            op=reduce_op_in(opts, op),
            group_dst=field_of(opts, "rootRank", root, 0),
            async_op=True,
            opts=opts,
            timeout=timeout,
            outputs=(tensor,),
        )

    @disable_dynamo
    def reduce_scatter(
        self,
        outputs: Tensors | Tensor,
        inputs: Sequence[Tensors] | Tensors,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        op: Any = None,
    ) -> TorchWork:
        """Reduce a tensor for each rank over all ranks, into that rank's output."""
        output, where = one_tensor(outputs), self._where("reduce_scatter")
        return self._issue(
            reductions.reduce_scatter,
            memory(output, where),
            memories(one_list(inputs), where),
            reduce_op_in(opts, op),
            async_op=True,
            opts=opts,
            timeout=timeout,
            outputs=(output,),
        )

    @disable_dynamo
    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> TorchWork:
        """Reduce a tensor over all ranks; each one's output becomes its part."""
        where = self._where("reduce_scatter_tensor")
        return self._issue(
            reductions.reduce_scatter_tensor,
            memory(output, where),
            memory(input, where),
            reduce_op_in(opts),
            async_op=True,
            opts=opts,
            outputs=(output,),
        )

    _reduce_scatter_base = reduce_scatter_single

    @disable_dynamo
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork:
        """Do `reduce_scatter_single` for each pair, as one batch."""
        where = self._where("reduce_scatter_tensor_coalesced")
        return self._issue(
            coalescing.reduce_scatter_tensor_coalesced,
            memories(outputs, where),
            memories(inputs, where),
            reduce_op_in(opts),
            async_op=True,
            opts=opts,
            outputs=outputs,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- moving data ------------------------------------------------------------

    @disable_dynamo
    def broadcast(
        self,
        tensors: Tensors | Tensor,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Send a tensor from the root to all ranks."""
        tensor = one_tensor(tensors)
        return self._issue(
            data_movement.broadcast,
            memory(tensor, self._where("broadcast"), moved=True),
            group_src=field_of(opts, "rootRank", root, 0),
            async_op=True,
            opts=opts,
            timeout=timeout,
            outputs=(tensor,),
        )

    @disable_dynamo
    def allgather(
        self,
        outputs: Sequence[Tensors] | Tensors,
        inputs: Tensors | Tensor,
        opts: Any = None,
        *,
        timeout: Timeout = None,
    ) -> TorchWork:
        """Gather a tensor of every rank on all ranks."""
        gathered, where = one_list(outputs), self._where("all_gather")
        return self._issue(
            data_movement.all_gather,
            memories(gathered, where, moved=True),
            memory(one_tensor(inputs), where, moved=True),
            async_op=True,
            opts=opts,
            timeout=timeout,
            outputs=[gathered],
        )

    @disable_dynamo
    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> TorchWork:
        """Gather several tensors of every rank, as one batch."""
        where = self._where("all_gather_coalesced")
        return self._issue(
            coalescing.all_gather_coalesced,
            [memories(one, where, moved=True) for one in outputs],
            memories(inputs, where, moved=True),
            async_op=True,
            opts=opts,
            outputs=outputs,
        )

    @disable_dynamo
    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> TorchWork:
        """Gather a tensor of every rank in one tensor."""
        where = self._where("all_gather_into_tensor")
        return self._issue(
            data_movement.all_gather_into_tensor,
            memory(output, where, moved=True),
            memory(input, where, moved=True),
            async_op=True,
            opts=opts,
            outputs=(output,),
        )

    _allgather_base = all_gather_single

    @disable_dynamo
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork:
        """Do `all_gather_single` for each pair, as one batch."""
        where = self._where("all_gather_into_tensor_coalesced")
        return self._issue(
            coalescing.all_gather_into_tensor_coalesced,
            memories(outputs, where, moved=True),
            memories(inputs, where, moved=True),
            async_op=True,
            opts=opts,
            outputs=outputs,
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @disable_dynamo
    def gather(
        self,
        outputs: Sequence[Tensors] | Tensors,
        inputs: Tensors | Tensor,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Gather a tensor of every rank on the root."""
        where, target = self._where("gather"), field_of(opts, "rootRank", root, 0)
        is_root = target == self.group.rank()
        gathered = one_list(outputs) if is_root else ()
        return self._issue(
            data_movement.gather,
            memory(one_tensor(inputs), where, moved=True),
            memories(gathered, where, moved=True) if is_root else None,
            group_dst=target,
            async_op=True,
            opts=opts,
            timeout=timeout,
            outputs=gathered,
        )

    @disable_dynamo
    def scatter(
        self,
        outputs: Tensors | Tensor,
        inputs: Sequence[Tensors] | Tensors,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Send each rank a tensor of its own from the root."""
        where, source = self._where("scatter"), field_of(opts, "rootRank", root, 0)
        is_root = source == self.group.rank()
        output = one_tensor(outputs)
        return self._issue(
            data_movement.scatter,
            memory(output, where, moved=True),
            memories(one_list(inputs), where, moved=True) if is_root else None,
            group_src=source,
            async_op=True,
            opts=opts,
            timeout=timeout,
            outputs=(output,),
        )

    @disable_dynamo
    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> TorchWork:
        """Send each rank a tensor of its own from every rank."""
        where = self._where("all_to_all")
        return self._issue(
            data_movement.all_to_all,
            memories(outputs, where, moved=True),
            memories(inputs, where, moved=True),
            async_op=True,
            opts=opts,
            outputs=outputs,
        )

    @disable_dynamo
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        *,
        timeout: Timeout = None,
    ) -> TorchWork:
        """Send each rank rows of a tensor from every rank; no sizes: evenly."""
        where = self._where("all_to_all_single")
        return self._issue(
            data_movement.all_to_all_single,
            row_memory(output, where),
            row_memory(input, where),
            list(output_splits) or None,
            list(input_splits) or None,
            async_op=True,
            opts=opts,
            timeout=timeout,
            outputs=(output,),
        )

    alltoall_base = all_to_all_single

    # -- messages and barriers ---------------------------------------------------------

    @disable_dynamo
    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> TorchWork:
        """Send a tensor to a rank of the group."""
        array = memory(one_tensor(tensors), self._where("send"), moved=True)
        return self._issue(point_to_point.isend, array, group_dst=peer, tag=tag)

    @disable_dynamo
    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> TorchWork:
        """Receive a tensor from a rank of the group."""
        array = memory(one_tensor(tensors), self._where("recv"), moved=True)
        return self._issue(
            point_to_point.irecv, array, group_src=peer, tag=tag, outputs=tensors
        )

    @disable_dynamo
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        """Receive a tensor from any rank, which ``source_rank()`` of the Work names."""
        array = memory(one_tensor(tensors), self._where("recv"), moved=True)
        return self._issue(point_to_point.irecv, array, tag=tag, outputs=tensors)

    @disable_dynamo
    def barrier(self, opts: Any = None, timeout: Timeout = None) -> TorchWork:
        """Wait for all ranks."""
        self._where("barrier")
        return self._issue(
            data_movement.barrier, async_op=True, opts=opts, timeout=timeout
        )

    @disable_dynamo
    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names those that do not come."""
        timeout = field_of(opts, "timeout", None, opts)
        monitored_barrier(self.group, timeout, wait_all_ranks)

    # -- batches ------------------------------------------------------------

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Begin a batch: ops of this thread are issued by `_end_coalescing`."""
        self._batch = coalescing.coalescing_manager(self.group, async_ops=True)
        self._manager = self._batch.__enter__()

    def _end_coalescing(self, device: torch.device | None = None) -> TorchWork:
        """Issue the batch; return its Work."""
        batch, self._batch = self._batch, None
        batch.__exit__(None, None, None)
        return TorchWork(self._manager.work)
