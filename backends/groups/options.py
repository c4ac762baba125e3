"""Options of the methods of a group, with the names and fields of c10d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ..work.reduce_op import ReduceOp
from .documentation import documented_options

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
    """What all options have; `documented_options` describes the fields."""

    timeout: float | timedelta | None = None
    asyncOp: bool = True


@documented_options
@dataclass
class AllreduceOptions(GroupOptions):
    """Options of ``ProcessGroup.allreduce``.

    Examples
    --------
    >>> opts = dist.AllreduceOptions(reduceOp=dist.ReduceOp.MAX, timeout=5)
    >>> dist.group.WORLD.allreduce([np.ones(2)], opts).wait()
    True
    """

    reduceOp: ReduceOp = ReduceOp.SUM


@documented_options
@dataclass
class AllreduceCoalescedOptions(AllreduceOptions):
    """Options of ``ProcessGroup.allreduce_coalesced``.

    Examples
    --------
    >>> opts = dist.AllreduceCoalescedOptions(timeout=5)
    >>> dist.group.WORLD.allreduce_coalesced([np.ones(2), np.ones(3)], opts).wait()
    True
    """


@documented_options
@dataclass
class ReduceScatterOptions(AllreduceOptions):
    """Options of ``ProcessGroup.reduce_scatter`` and its other forms.

    Examples
    --------
    >>> opts = dist.ReduceScatterOptions(reduceOp=dist.ReduceOp.MAX)
    >>> dist.group.WORLD.reduce_scatter(np.zeros(2), [np.ones(2)], opts=opts).wait()
    True
    """


@documented_options
@dataclass
class BroadcastOptions(GroupOptions):
    """Options of ``ProcessGroup.broadcast``.

    Examples
    --------
    >>> opts = dist.BroadcastOptions(rootRank=0)
    >>> dist.group.WORLD.broadcast([np.ones(2)], opts).wait()
    True
    """

    rootRank: int = 0
    rootTensor: int = 0


@documented_options
@dataclass
class ReduceOptions(BroadcastOptions):
    """Options of ``ProcessGroup.reduce``.

    Examples
    --------
    >>> opts = dist.ReduceOptions(rootRank=0, reduceOp=dist.ReduceOp.MAX)
    >>> dist.group.WORLD.reduce([np.ones(2)], opts).wait()
    True
    """

    reduceOp: ReduceOp = ReduceOp.SUM


@documented_options
@dataclass
class GatherOptions(GroupOptions):
    """Options of ``ProcessGroup.gather``.

    Examples
    --------
    >>> opts = dist.GatherOptions(rootRank=0)
    >>> dist.group.WORLD.gather([[np.zeros(2)]], [np.ones(2)], opts).wait()
    True
    """

    rootRank: int = 0


@documented_options
@dataclass
class ScatterOptions(GatherOptions):
    """Options of ``ProcessGroup.scatter``.

    Examples
    --------
    >>> opts = dist.ScatterOptions(rootRank=0)
    >>> dist.group.WORLD.scatter([np.zeros(2)], [[np.ones(2)]], opts).wait()
    True
    """


@documented_options
@dataclass
class AllgatherOptions(GroupOptions):
    """Options of ``ProcessGroup.allgather`` and its other forms.

    Examples
    --------
    >>> opts = dist.AllgatherOptions(timeout=5)
    >>> dist.group.WORLD.allgather([[np.zeros(2)]], [np.ones(2)], opts).wait()
    True
    """


@documented_options
@dataclass
class AllToAllOptions(GroupOptions):
    """Options of ``ProcessGroup.alltoall`` and ``alltoall_base``.

    Examples
    --------
    >>> opts = dist.AllToAllOptions(timeout=5)
    >>> dist.group.WORLD.alltoall([np.zeros(2)], [np.ones(2)], opts).wait()
    True
    """


@documented_options
@dataclass
class BarrierOptions(GroupOptions):
    """Options of ``ProcessGroup.barrier``, which name its device if not the first.

    Examples
    --------
    >>> dist.group.WORLD.barrier(dist.BarrierOptions(timeout=5)).wait()
    True
    """

    device_ids: Sequence[int] = field(default_factory=list)
    device: Any = None
