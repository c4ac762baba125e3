"""The functions that the methods of a group call, entered where they are looked up."""

from __future__ import annotations

from ..groups.group_ops import GroupOps
from .coalescing import (
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    coalescing_manager,
    reduce_scatter_tensor_coalesced,
)
from .data_movement import (
    all_gather,
    all_gather_into_tensor,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    scatter,
)
from .monitored_barrier import monitored_barrier
from .point_to_point import irecv, isend
from .reductions import all_reduce, reduce, reduce_scatter, reduce_scatter_tensor

__all__: list[str] = []

GroupOps.functions = {
    function.__name__: function
    for function in (
        all_gather,
        all_gather_into_tensor,
        all_gather_into_tensor_coalesced,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        coalescing_manager,
        gather,
        irecv,
        isend,
        monitored_barrier,
        reduce,
        reduce_scatter,
        reduce_scatter_tensor,
        reduce_scatter_tensor_coalesced,
        scatter,
    )
}
