"""Options of the methods of a group, with the names and fields of c10d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..work.reduce_op import ReduceOp

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "GroupOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
]


@dataclass
class GroupOptions:
    """What all options have.

    Parameters
    ----------
    timeout : float or timedelta, optional
        The timeout of the op (`op_timeout`), in seconds if it is a number; the default
        is the group's.
    asyncOp : bool, default True
        Not used, as a method of a group returns a Work in either case: accepted for
        c10d's fields.
    """

    timeout: float | timedelta | None = None
    asyncOp: bool = True


@dataclass
class AllreduceOptions(GroupOptions):
    """Options of ``ProcessGroup.allreduce``.

    Parameters
    ----------
    reduceOp : ReduceOp, default SUM
        The reduction.

    Examples
    --------
    >>> opts = dist.AllreduceOptions(reduceOp=dist.ReduceOp.MAX, timeout=5)
    >>> dist.group.WORLD.allreduce([np.ones(2)], opts).wait()
    True
    """

    reduceOp: ReduceOp = ReduceOp.SUM


class AllreduceCoalescedOptions(AllreduceOptions):
    """Options of ``ProcessGroup.allreduce_coalesced``.

    Examples
    --------
    >>> opts = dist.AllreduceCoalescedOptions(timeout=5)
    >>> dist.group.WORLD.allreduce_coalesced([np.ones(2), np.ones(3)], opts).wait()
    True
    """


class ReduceScatterOptions(AllreduceOptions):
    """Options of ``ProcessGroup.reduce_scatter`` and its other forms.

    Examples
    --------
    >>> opts = dist.ReduceScatterOptions(reduceOp=dist.ReduceOp.MAX)
    >>> dist.group.WORLD.reduce_scatter(np.zeros(2), [np.ones(2)], opts=opts).wait()
    True
    """


@dataclass
class BroadcastOptions(GroupOptions):
    """Options of ``ProcessGroup.broadcast``.

    Parameters
    ----------
    rootRank : int, default 0
        The root, by its rank in the group.
    rootTensor : int, default 0
        Not used, as a rank has one array: accepted for c10d's fields.

    Examples
    --------
    >>> opts = dist.BroadcastOptions(rootRank=0)
    >>> dist.group.WORLD.broadcast([np.ones(2)], opts).wait()
    True
    """

    rootRank: int = 0
    rootTensor: int = 0


@dataclass
class ReduceOptions(BroadcastOptions):
    """Options of ``ProcessGroup.reduce``.

    Parameters
    ----------
    reduceOp : ReduceOp, default SUM
        The reduction.

    Examples
    --------
    >>> opts = dist.ReduceOptions(rootRank=0, reduceOp=dist.ReduceOp.MAX)
    >>> dist.group.WORLD.reduce([np.ones(2)], opts).wait()
    True
    """

    reduceOp: ReduceOp = ReduceOp.SUM


@dataclass
class GatherOptions(GroupOptions):
    """Options of ``ProcessGroup.gather``.

    Parameters
    ----------
    rootRank : int, default 0
        The root, by its rank in the group.

    Examples
    --------
    >>> opts = dist.GatherOptions(rootRank=0)
    >>> dist.group.WORLD.gather([[np.zeros(2)]], [np.ones(2)], opts).wait()
    True
    """

    rootRank: int = 0


class ScatterOptions(GatherOptions):
    """Options of ``ProcessGroup.scatter``.

    Examples
    --------
    >>> opts = dist.ScatterOptions(rootRank=0)
    >>> dist.group.WORLD.scatter([np.zeros(2)], [[np.ones(2)]], opts).wait()
    True
    """


class AllgatherOptions(GroupOptions):
    """Options of ``ProcessGroup.allgather`` and its other forms.

    Examples
    --------
    >>> opts = dist.AllgatherOptions(timeout=5)
    >>> dist.group.WORLD.allgather([[np.zeros(2)]], [np.ones(2)], opts).wait()
    True
    """


class AllToAllOptions(GroupOptions):
    """Options of ``ProcessGroup.alltoall`` and ``alltoall_base``.

    Examples
    --------
    >>> opts = dist.AllToAllOptions(timeout=5)
    >>> dist.group.WORLD.alltoall([np.zeros(2)], [np.ones(2)], opts).wait()
    True
    """


@dataclass
class BarrierOptions(GroupOptions):
    """Options of ``ProcessGroup.barrier``, which name its device if not the first.

    Parameters
    ----------
    device_ids : sequence of int, optional
        The CUDA device of this rank, in a list.
    device : str or torch.device, optional
        The device type whose backend runs the barrier; the group's first by default.

    Examples
    --------
    >>> dist.group.WORLD.barrier(dist.BarrierOptions(timeout=5)).wait()
    True
    """

    device_ids: Sequence[int] = ()
    device: Any = None
