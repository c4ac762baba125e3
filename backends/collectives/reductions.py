"""Collectives that reduce arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..devices.arrays import check_dtypes, check_size
from ..groups.api import Group, resolve_group
from ..interface.op import Op
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work
from .arguments import (
    Array,
    Place,
    check_op,
    check_same,
    take,
    take_list,
    take_on,
    take_peer,
)
from .sparse import is_sparse, sparse_all_reduce

__all__ = [
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
]


def all_reduce(
    tensor: Array,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce `tensor` over all ranks; every rank's `tensor` becomes the result.

    A scipy.sparse array (COO or CSR) is summed too: its patterns may differ
    from rank to rank. That blocks, so ``async_op=True`` raises `ValueError`.
    """
    pg = resolve_group(group, "all_reduce")
    check_op(op, "all_reduce", pg)
    if type(tensor) is not np.ndarray and is_sparse(tensor):
        sparse_all_reduce(tensor, op, pg, async_op)
        return None
    array, device = take(tensor, "tensor", OpType.ALL_REDUCE, pg)
    return pg.issue(
        Op(OpType.ALL_REDUCE, device, (array,), (array,), result=array, reduce_op=op)
    ).finish(async_op)


def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce `tensor` over all ranks into `tensor` of rank `dst`.

    The other ranks' `tensor` is left as it is.
    """
    pg = resolve_group(group, "reduce")
    check_op(op, "reduce", pg)
    root = take_peer(pg, dst, group_dst, "dst", "reduce")
    array, device = take(tensor, "tensor", OpType.REDUCE, pg, writable=pg.rank == root)
    return pg.issue(
        Op(
            OpType.REDUCE,
            device,
            (array,),
            (array, root),
            result=array if pg.rank == root else None,
            reduce_op=op,
            peer=root,
        )
    ).finish(async_op)


def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """`output` becomes the reduction of all ranks' ``input_list[rank]``.

    Entry r has the size of rank r's `output`; sizes may differ. The entries
    are not changed.
    """
    pg = resolve_group(group, "reduce_scatter")
    kind = OpType.REDUCE_SCATTER
    where = Place(kind, pg)
    check_op(op, "reduce_scatter", pg)
    array, device = take(output, "output", kind, pg)
    inputs = take_list(input_list, "input_list", kind, pg, device, writable=False)
    check_same([array, *inputs], "output", "input_list", where)
    check_size(
        array,
        "output",
        inputs[pg.rank].size,
        f"the size of input_list[{pg.rank}], this rank's part",
        where,
    )
    return pg.issue(
        Op(
            kind,
            device,
            (*inputs, array),
            (array, inputs),
            result=array,
            reduce_op=op,
        )
    ).finish(async_op)


def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """As :func:`reduce_scatter`, the parts being equal slices of `input`.

    `input` has world-size times the elements of `output` and is not changed.
    """
    pg = resolve_group(group, "reduce_scatter_tensor")
    kind = OpType.REDUCE_SCATTER_TENSOR
    where = Place(kind, pg)
    check_op(op, "reduce_scatter_tensor", pg)
    array, device = take(output, "output", kind, pg)
    source = take_on(input, "input", kind, pg, device, writable=False)
    check_dtypes([array, source], ["output", "input"], where)
    check_size(
        source,
        "input",
        array.size * pg.size(),
        f"{pg.size()} ranks times {array.size} elements of output",
        where,
    )
    return pg.issue(
        Op(
            kind,
            device,
            (source, array),
            (array, source),
            result=array,
            reduce_op=op,
        )
    ).finish(async_op)
