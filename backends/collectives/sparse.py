"""Sparse all_reduce: sums of scipy.sparse matrices whose patterns may differ."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..groups.process_group import ProcessGroup
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from .arguments import Place
from .data_movement import all_gather

__all__ = ["is_sparse", "sparse_all_reduce"]


def is_sparse(value: Any) -> bool:
    """Return whether `value` is a scipy.sparse array or matrix (imports no scipy)."""
    scipy_sparse = sys.modules.get("scipy.sparse")
    return scipy_sparse is not None and bool(scipy_sparse.issparse(value))


def sparse_all_reduce(
    tensor: Any, op: ReduceOp, pg: ProcessGroup, async_op: bool
) -> None:
    """Sum `tensor` (COO or CSR, 2-d) over all ranks, in place.

    The entries of all ranks are gathered and added; their number may differ.
    The semantics are those of gloo's sparse allreduce in c10d: SUM alone, one
    shape and dtype on all ranks; the result is canonical (no duplicates, sorted).
    """
    where = Place(OpType.ALL_REDUCE, pg)
    if tensor.format not in ("coo", "csr"):
        raise TypeError(
            f"{where}: tensor is sparse in {tensor.format!r} format; expected 'coo' or "
            "'csr' (tensor.tocsr())"
        )
    if op is not ReduceOp.SUM:
        raise ValueError(
            f"{where}: op is ReduceOp.{op.name}; sparse arrays can be summed only"
        )
    if async_op:
        raise ValueError(
            f"{where}: tensor is sparse, which takes several ops one after the other; "
            "expected async_op=False"
        )
    import scipy.sparse as sp

    entries = tensor.tocoo()
    count = np.array([entries.nnz], np.int64)
    counts = np.empty(pg.size(), np.int64)
    all_gather(list(counts.reshape(-1, 1)), count, group=pg)

    def gathered(mine: Any) -> Any:
        everybody = np.empty(int(counts.sum()), mine.dtype)
        parts = np.split(everybody, np.cumsum(counts)[:-1])
        all_gather(parts, np.ascontiguousarray(mine), group=pg)
        return everybody

    rows = gathered(entries.row.astype(np.int64))
    columns = gathered(entries.col.astype(np.int64))
    values = gathered(entries.data)
    total = sp.coo_array((values, (rows, columns)), shape=tensor.shape).tocsr()
    total.sum_duplicates()
    if tensor.format == "coo":
        result = total.tocoo()
        tensor.data = result.data
        tensor.coords = (result.row, result.col)
        return
    tensor.data, tensor.indices, tensor.indptr = (
        total.data,
        total.indices,
        total.indptr,
    )
