"""Options of the methods of a group, with the names and fields of c10d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        The timeout of the op (``op_timeout``); the group's, if it is not given.
    asyncOp : bool, default True
        Accepted for c10d's fields: a method of a group returns a Work in either case.
    """

    timeout: float | timedelta | None = None
    asyncOp: bool = True


@dataclass
class AllreduceOptions(GroupOptions):
    """Options of ``ProcessGroup.allreduce``."""

    reduceOp: ReduceOp = ReduceOp.SUM


@dataclass
class AllreduceCoalescedOptions(AllreduceOptions):
    """Options of ``ProcessGroup.allreduce_coalesced``."""


@dataclass
class ReduceScatterOptions(AllreduceOptions):
    """Options of ``ProcessGroup.reduce_scatter`` and its other forms."""


@dataclass
class BroadcastOptions(GroupOptions):
    """Options of ``ProcessGroup.broadcast``; `rootRank` is a rank in the group."""

    rootRank: int = 0
    rootTensor: int = 0


@dataclass
class ReduceOptions(BroadcastOptions):
    """Options of ``ProcessGroup.reduce``; `rootRank` is a rank in the group."""

    reduceOp: ReduceOp = ReduceOp.SUM


@dataclass
class GatherOptions(GroupOptions):
    """Options of ``ProcessGroup.gather``; `rootRank` is a rank in the group."""

    rootRank: int = 0


@dataclass
class ScatterOptions(GatherOptions):
    """Options of ``ProcessGroup.scatter``; `rootRank` is a rank in the group."""


@dataclass
class AllgatherOptions(GroupOptions):
    """Options of ``ProcessGroup.allgather`` and its other forms."""


@dataclass
class AllToAllOptions(GroupOptions):
    """Options of ``ProcessGroup.alltoall`` and ``alltoall_base``."""


@dataclass
class BarrierOptions(GroupOptions):
    """Options of ``ProcessGroup.barrier``, which name its device if not the first."""

    device_ids: Sequence[int] = field(default_factory=list)
    device: Any = None
