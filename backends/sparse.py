"""Sparse all_reduce: sums of scipy.sparse matrices whose patterns may differ."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import Place
from .reduce_op import ReduceOp
from .work import OpType

if TYPE_CHECKING:
    from .process_group import ProcessGroup

__all__ = ["is_sparse", "sparse_all_reduce"]


def is_sparse(value: Any) -> bool:
    """Whether `value` is a scipy.sparse array or matrix, without importing scipy."""
    scipy_sparse = sys.modules.get("scipy.sparse")
    return scipy_sparse is not None and bool(scipy_sparse.issparse(value))


def sparse_all_reduce(
    tensor: Any, op: ReduceOp, pg: ProcessGroup, async_op: bool
) -> None:
    """Sum `tensor` (COO or CSR, 2-d) over all ranks, in place.

    Each rank's entries are gathered, whose number may differ, and added up.
    Semantics of gloo's sparse allreduce in c10d: SUM alone, one shape and
    dtype on all ranks; the result is canonical (no duplicates, sorted).
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

    # This module is what `collectives` stands on for sparse arrays.
    from .collectives import all_gather

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
