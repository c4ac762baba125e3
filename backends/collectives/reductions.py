"""Collectives that reduce arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..devices.arrays import check_dtypes, check_size
from ..groups.membership import Group, member_group
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
from .documentation import documented
from .sparse import is_sparse, sparse_all_reduce

__all__ = [
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
]


@documented
def all_reduce(
    tensor: Array,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce `tensor` over all ranks; every rank's `tensor` becomes the result.

    Parameters
    ----------
    tensor : array
        Read and written in place; C-contiguous and writable, of one size and dtype on
        all ranks: of numpy or cupy, or a tensor of torch on the CPU or on CUDA. A
        scipy.sparse array or matrix (COO or CSR, of two dimensions) can be summed, too,
        where every rank has one: its pattern of entries may differ from rank to rank,
        its shape and dtype may not. Other reductions of it raise `ValueError`, and so
        does a `coalescing_manager` block.

    Notes
    -----
    The semantics are those of ``torch.distributed.all_reduce``. The reductions by dtype
    and backend, of which ``docs/backends.md`` has the whole tables:

    ==================  =========================  =============================
    dtype               gloo, ucx, mpi, ucc        nccl
    ==================  =========================  =============================
    integers            all but PREMUL_SUM         SUM, AVG, PRODUCT, MIN, MAX;
                                                   of 16 bits none
    bool                all but AVG, PREMUL_SUM    SUM, PRODUCT, MIN, MAX
    floats, bfloat16    all but BAND, BOR, BXOR;   all but BAND, BOR, BXOR
                        on ucc those of 16 bits
                        PREMUL_SUM alone
    complex             SUM, AVG, PRODUCT;         SUM, AVG
                        on gloo SUM, AVG
    ==================  =========================  =============================

    SUM of bool is "or", PRODUCT "and". Anything else is refused before it is sent. NCCL
    2.24 reduces float8 on GPUs of compute capability 9.0.

    Examples
    --------
    >>> x = np.array([1.0, 2.0])
    >>> dist.all_reduce(x)  # one rank: the sum over the ranks is x itself
    >>> x
    array([1., 2.])
    >>> work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True)
    >>> work.wait()
    True
    """
    pg = member_group(group, "all_reduce")
    if pg is None:
        return None
    check_op(op, "all_reduce", pg)
    if type(tensor) is not np.ndarray and is_sparse(tensor):
        return sparse_all_reduce(tensor, op, pg).finish(async_op)
    array, device = take(tensor, "tensor", OpType.ALL_REDUCE, pg)
    return pg.issue(
        Op(OpType.ALL_REDUCE, device, (array,), (array,), result=array, reduce_op=op)
    ).finish(async_op)


@documented
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce `tensor` over all ranks into `tensor` of rank `dst`.

    Parameters
    ----------
    tensor : array
        Read on every rank, written in place on `dst`; the other ranks' arrays keep
        their content. C-contiguous, of one size and dtype on all ranks.

    Notes
    -----
    The semantics are those of ``torch.distributed.reduce``, except that the arrays of
    the other ranks are never used as scratch memory.

    Examples
    --------
    >>> x = np.array([1.0, 2.0])
    >>> dist.reduce(x, dst=0)
    >>> x
    array([1., 2.])
    """
    pg = member_group(group, "reduce")
    if pg is None:
        return None
    check_op(op, "reduce", pg)
    root = take_peer(pg, dst, group_dst, "dst", "reduce")
    is_root = pg.rank() == root
    array, device = take(tensor, "tensor", OpType.REDUCE, pg, writable=is_root)
    return pg.issue(
        Op(
            OpType.REDUCE,
            device,
            (array,),
            (array, root),
            result=array if is_root else None,
            reduce_op=op,
            peer=root,
        )
    ).finish(async_op)


@documented
def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``input_list[r]`` of all ranks into `output` of rank r.

    Parameters
    ----------
    output : array
        Written; its size is that of ``input_list[rank]``.
    input_list : list of arrays
        One array per rank, all of one dtype, which are read. Entry r has the size of
        rank r's `output`; sizes may differ from entry to entry.

    Notes
    -----
    The semantics are those of ``torch.distributed.reduce_scatter``.

    Examples
    --------
    >>> out = np.empty(2)
    >>> dist.reduce_scatter(out, [np.array([1.0, 2.0])])
    >>> out
    array([1., 2.])
    """
    pg = member_group(group, "reduce_scatter")
    if pg is None:
        return None
    kind = OpType.REDUCE_SCATTER
    where = Place(kind, pg)
    check_op(op, "reduce_scatter", pg)
    array, device = take(output, "output", kind, pg)
    inputs = take_list(input_list, "input_list", kind, pg, device, writable=False)
    check_same([array, *inputs], "output", "input_list", where)
    check_size(
        array,
        "output",
        inputs[pg.rank()].size,
        f"the size of input_list[{pg.rank()}], this rank's part",
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


@documented
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce `input` over all ranks; `output` of rank r becomes part r of the result.

    Parameters
    ----------
    output : array
        Written.
    input : array
        Read; world-size times the elements of `output`, of the same dtype. Part r is
        the r-th of world-size equal slices of the flat array.

    Notes
    -----
    The semantics are those of ``torch.distributed.reduce_scatter_tensor``.

    Examples
    --------
    >>> out = np.empty(2)
    >>> dist.reduce_scatter_tensor(out, np.array([1.0, 2.0]))
    >>> out
    array([1., 2.])
    """
    pg = member_group(group, "reduce_scatter_tensor")
    if pg is None:
        return None
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
