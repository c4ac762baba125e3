"""Sums of sparse tensors, as torch's gloo has them: patterns differ from rank to rank.

Entries and their number are gathered by three collectives, one after the other.
"""

from __future__ import annotations

import numpy as np
import torch

from ..collectives.data_movement import all_gather_into_tensor
from ..groups.process_group import ProcessGroup
from ..work.reduce_op import ReduceOp
from .tensors import memory

__all__ = ["sparse_all_reduce"]


def sparse_all_reduce(
    tensor: torch.Tensor, op: ReduceOp, group: ProcessGroup, where: object
) -> None:
    """Add up `tensor` over all ranks, in place; it becomes coalesced.

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
