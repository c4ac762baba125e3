"""The ops of a group as methods, by which libraries call c10d's ProcessGroup."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

# The functions know the groups, so this module cannot import theirs. The package has
# them all when a method is called.
import rankscope.backends as dist

from ..work.op_timeout import op_timeout
from ..work.reduce_op import ReduceOp
from ..work.work import Work

__all__ = ["GroupOps"]

Array = Any
Arrays = Sequence[Array]
Timeout = float | timedelta | None
_MISSING = object()
#: A function of ``rankscope`` that starts an op.
Function: TypeAlias = Callable[..., Work | None]


class GroupOps:
    """The methods of ``torch.distributed.ProcessGroup`` that start an op.

    Each is the function of ``rankscope`` that its docstring names, with
    ``async_op=True``: it checks its arguments and raises errors as the function does,
    and returns a :class:`Work`. Their arguments, as in c10d:

    - `tensors`, `input_tensors`: the function's array, alone or in a list of one.
    - `output_tensors`: what is written, as the function's output; or that in a list.
    - `input_list`, `output_lists`: arrays of this rank; for every rank as many.
    - `input`, `inputs`, `output`, `outputs`: what is read, and what is written.
    - `input_split_sizes`, `output_split_sizes`: rows by rank; missing or empty: evenly.
    - `root`, `op`: rank in the group (0), reduction (SUM); or `opts` in this place.
    - `dstRank`, `srcRank`: ranks in the group.
    - `tag`: as of `isend`.
    - `timeout`: of the op, in seconds or as a `timedelta`; by default the group's.
    - `wait_all_ranks`: whether an error names all missing ranks, not the first alone.
    - `opts`: c10d's options of the op; arguments go before its fields.
    """

    def _start(
        self, function: Function, limit: Any, *arrays: Any, **kwargs: Any
    ) -> Work:
        """Call a function of ``rankscope``; `limit`: a timeout, or options with one."""
        timeout: Timeout = getattr(limit, "timeout", limit)
        own = contextlib.nullcontext() if timeout is None else op_timeout(timeout)
        with own:
            work = function(*arrays, group=self, **kwargs)
        assert work is not None  # this rank is in the group
        return work

    def _issue(
        self, function: Function, limit: Any, *arrays: Any, **kwargs: Any
    ) -> Work:
        return self._start(function, limit, *arrays, async_op=True, **kwargs)

    def broadcast(
        self,
        tensors: Arrays | Array,
        root: int | dist.BroadcastOptions | None = None,
        timeout: Timeout = None,
        *,
        opts: dist.BroadcastOptions | None = None,
    ) -> Work:
        """Do `rankscope.broadcast` from rank `root` of the group (default 0)."""
        opts, source = _options(opts, root, dist.BroadcastOptions, "rootRank")
        return self._issue(
            dist.broadcast,
            opts if timeout is None else timeout,
            _one(tensors, "broadcast"),
            group_src=source,
        )

    def allreduce(
        self,
        tensors: Arrays | Array,
        op: ReduceOp | dist.AllreduceOptions | None = None,
        timeout: Timeout = None,
        *,
        opts: dist.AllreduceOptions | None = None,
    ) -> Work:
        """Do `rankscope.all_reduce` by `op` (default: SUM)."""
        opts, reduce_op = _options(opts, op, dist.AllreduceOptions, "reduceOp")
        return self._issue(
            dist.all_reduce,
            opts if timeout is None else timeout,
            _one(tensors, "allreduce"),
            op=reduce_op,
        )

    def allreduce_coalesced(
        self, tensors: Arrays, opts: dist.AllreduceCoalescedOptions | None = None
    ) -> Work:
        """Do `rankscope.all_reduce_coalesced`."""
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._issue(dist.all_reduce_coalesced, opts, tensors, op=opts.reduceOp)

    def reduce(
        self,
        tensors: Arrays | Array,
        root: int | dist.ReduceOptions | None = None,
        op: ReduceOp | None = None,
        timeout: Timeout = None,
        *,
        opts: dist.ReduceOptions | None = None,
    ) -> Work:
        """Do `rankscope.reduce` to rank `root` of the group (default 0)."""
        opts, target = _options(opts, root, dist.ReduceOptions, "rootRank")
        return self._issue(
            dist.reduce,
            opts if timeout is None else timeout,
            _one(tensors, "reduce"),
            group_dst=target,
            op=opts.reduceOp if op is None else op,
        )

    def allgather(
        self,
        output_tensors: Sequence[Arrays] | Arrays,
        input_tensors: Arrays | Array,
        timeout: Timeout | dist.AllgatherOptions = None,
        *,
        opts: dist.AllgatherOptions | None = None,
    ) -> Work:
        """Do `rankscope.all_gather`."""
        return self._issue(
            dist.all_gather,
            opts if timeout is None else timeout,
            _one_list(output_tensors, "allgather"),
            _one(input_tensors, "allgather"),
        )

    def allgather_coalesced(
        self,
        output_lists: Sequence[Arrays],
        input_list: Arrays,
        opts: dist.AllgatherOptions | None = None,
    ) -> Work:
        """Do `rankscope.all_gather_coalesced`."""
        return self._issue(dist.all_gather_coalesced, opts, output_lists, input_list)

    def all_gather_single(
        self, output: Array, input: Array, opts: dist.AllgatherOptions | None = None
    ) -> Work:
        """Do `rankscope.all_gather_into_tensor`."""
        return self._issue(dist.all_gather_into_tensor, opts, output, input)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Arrays, inputs: Arrays, opts: dist.AllgatherOptions | None = None
    ) -> Work:
        """Do `rankscope.all_gather_into_tensor_coalesced`."""
        return self._issue(dist.all_gather_into_tensor_coalesced, opts, outputs, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        output_tensors: Sequence[Arrays] | Arrays,
        input_tensors: Arrays | Array,
        root: int | dist.GatherOptions | None = None,
        timeout: Timeout = None,
        *,
        opts: dist.GatherOptions | None = None,
    ) -> Work:
        """Do `rankscope.gather` to rank `root` of the group (default 0).

        `output_tensors` is empty on the other ranks.
        """
        opts, target = _options(opts, root, dist.GatherOptions, "rootRank")
        return self._issue(
            dist.gather,
            opts if timeout is None else timeout,
            _one(input_tensors, "gather"),
            _one_list(output_tensors, "gather") or None,
            group_dst=target,
        )

    def scatter(
        self,
        output_tensors: Arrays | Array,
        input_tensors: Sequence[Arrays] | Arrays,
        root: int | dist.ScatterOptions | None = None,
        timeout: Timeout = None,
        *,
        opts: dist.ScatterOptions | None = None,
    ) -> Work:
        """Do `rankscope.scatter` from rank `root` of the group (default 0).

        `input_tensors` is empty on the other ranks.
        """
        opts, source = _options(opts, root, dist.ScatterOptions, "rootRank")
        return self._issue(
            dist.scatter,
            opts if timeout is None else timeout,
            _one(output_tensors, "scatter"),
            _one_list(input_tensors, "scatter") or None,
            group_src=source,
        )

    def reduce_scatter(
        self,
        output_tensors: Arrays | Array,
        input_tensors: Sequence[Arrays] | Arrays,
        op: ReduceOp | dist.ReduceScatterOptions | None = None,
        timeout: Timeout = None,
        *,
        opts: dist.ReduceScatterOptions | None = None,
    ) -> Work:
        """Do `rankscope.reduce_scatter` by `op` (default: SUM)."""
        opts, reduce_op = _options(opts, op, dist.ReduceScatterOptions, "reduceOp")
        return self._issue(
            dist.reduce_scatter,
            opts if timeout is None else timeout,
            _one(output_tensors, "reduce_scatter"),
            _one_list(input_tensors, "reduce_scatter"),
            op=reduce_op,
        )

    def reduce_scatter_single(
        self, output: Array, input: Array, opts: dist.ReduceScatterOptions | None = None
    ) -> Work:
        """Do `rankscope.reduce_scatter_tensor`."""
        opts = opts or dist.ReduceScatterOptions()
        return self._issue(
            dist.reduce_scatter_tensor, opts, output, input, op=opts.reduceOp
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self,
        outputs: Arrays,
        inputs: Arrays,
        opts: dist.ReduceScatterOptions | None = None,
    ) -> Work:
        """Do `rankscope.reduce_scatter_tensor_coalesced`."""
        opts = opts or dist.ReduceScatterOptions()
        return self._issue(
            dist.reduce_scatter_tensor_coalesced,
            opts,
            outputs,
            inputs,
            op=opts.reduceOp,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self,
        output_tensors: Arrays,
        input_tensors: Arrays,
        opts: dist.AllToAllOptions | None = None,
    ) -> Work:
        """Do `rankscope.all_to_all`."""
        return self._issue(dist.all_to_all, opts, output_tensors, input_tensors)

    def all_to_all_single(
        self,
        output: Array,
        input: Array,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        timeout: Timeout | dist.AllToAllOptions = None,
        *,
        opts: dist.AllToAllOptions | None = None,
    ) -> Work:
        """Do `rankscope.all_to_all_single`; empty or missing sizes split evenly."""
        return self._issue(
            dist.all_to_all_single,
            opts if timeout is None else timeout,
            output,
            input,
            output_split_sizes=output_split_sizes or None,
            input_split_sizes=input_split_sizes or None,
        )

    alltoall_base = all_to_all_single

    def send(self, tensors: Arrays | Array, dstRank: int, tag: int = 0) -> Work:
        """Do `rankscope.isend` to rank `dstRank` of the group."""
        array = _one(tensors, "send")
        return self._start(dist.isend, None, array, group_dst=dstRank, tag=tag)

    def recv(self, tensors: Arrays | Array, srcRank: int, tag: int = 0) -> Work:
        """Do `rankscope.irecv` from rank `srcRank` of the group."""
        array = _one(tensors, "recv")
        return self._start(dist.irecv, None, array, group_src=srcRank, tag=tag)

    def recv_anysource(self, tensors: Arrays | Array, tag: int = 0) -> Work:
        """Do `rankscope.irecv` from any rank, which ``work.source_rank()`` names."""
        array = _one(tensors, "recv_anysource")
        return self._start(dist.irecv, None, array, tag=tag)

    def barrier(
        self,
        timeout: Timeout | dist.BarrierOptions = None,
        *,
        opts: dist.BarrierOptions | None = None,
    ) -> Work:
        """Do `rankscope.barrier`; return its Work."""
        opts, seconds = _options(opts, timeout, dist.BarrierOptions, "timeout")
        return self._issue(
            dist.barrier,
            seconds,
            device_ids=opts.device_ids or None,
            device=opts.device,
        )

    def monitored_barrier(
        self, timeout: Timeout = None, wait_all_ranks: bool = False
    ) -> None:
        """Do `rankscope.monitored_barrier`, which blocks."""
        group: Any = self
        dist.monitored_barrier(group, timeout, wait_all_ranks)


def _options(given: Any, argument: Any, kind: type[Any], field: str) -> tuple[Any, Any]:
    """Return the options object of a call, and the value of one of its fields.

    The options, ours or torch's, are `given` by name, or stand in the place of the
    `argument` for `field`, or are the defaults; the argument goes before them.
    """
    if given is None:
        found = getattr(argument, field, _MISSING)
        if found is not _MISSING:
            return argument, found
    # The defaults are attributes of the class, too.
    opts = kind if given is None else given
    return opts, getattr(opts, field) if argument is None else argument


def _one(tensors: Any, name: str) -> Array:
    """Return the one array of `tensors`: of a list, its entry."""
    if not isinstance(tensors, (list, tuple)):
        return tensors
    if len(tensors) != 1:
        raise ValueError(
            f"ProcessGroup.{name}: the list has {len(tensors)} arrays; expected one, "
            "as a rank has one device; allreduce_coalesced takes several"
        )
    return tensors[0]


def _one_list(lists: Any, name: str) -> Arrays:
    """Return the list of arrays of `lists`: of a list of lists, its entry."""
    if lists and isinstance(lists[0], (list, tuple)):
        inner: Arrays = _one(lists, name)
        return inner
    return lists
