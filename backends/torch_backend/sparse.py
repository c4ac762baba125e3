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

    Raises `ValueError` for another reduction than SUM, and for another layout than COO.
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
    counts = np.empty(ranks, np.int64)
    all_gather_into_tensor(counts, np.array([own._nnz()], np.int64), group)
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
