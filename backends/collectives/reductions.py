"""Collectives that reduce arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..groups.membership import Group, member_group
from ..interface.op import Op
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work
from .arguments import Array, Call, check_op, take, take_peer
from .sparse import is_sparse, sparse_all_reduce

__all__ = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]


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
    op : ReduceOp, default SUM
        The reduction, the same on all ranks; the Notes say which dtypes have which. AVG
        is a sum, divided by the number of ranks.
    group : ProcessGroup, optional
        The group; ``None`` is the default group. Every rank of it makes the call. On a
        rank outside the group, to which `new_group` returned
        `GroupMember.NON_GROUP_MEMBER`, the call only warns.
    async_op : bool, default False
        Return a `Work` at once instead of blocking. The arrays belong to the op until
        the Work is over.

    Returns
    -------
    Work or None
        The Work with ``async_op=True``, else ``None`` after the op has ended. On a GPU
        the caller's current stream waits for the op, and the host does not. On a rank
        outside the group there is no op to wait for: ``None``, or a Work that is over.

    Raises
    ------
    TypeError
        An argument is no array, no reduction or no group; a dtype is not in the Notes,
        or needs a missing package; the backend has the reduction, but not for the
        dtype.
    ValueError
        There is no default group (`init_process_group` makes it), and `group` is
        ``None``; an array is not C-contiguous, or read-only where it is written; the
        group has no backend for the device type of the arrays; they are on several
        devices, or not on the ``device_id`` of `init_process_group`; the backend has
        the reduction for no dtype; PREMUL_SUM has no factor (`make_nccl_premul_sum`).
        `ValueError` and `TypeError` are raised before this rank sends anything, and the
        group stays usable; ranks whose call was right wait for this one.
    NotImplementedError
        The backend of the arrays' device type does not have the op.
    DistTimeoutError, DistAbortedError, DistBackendError
        The op failed. The message names rank, op and sequence number; the error has
        them as attributes. With ``async_op=True`` ``wait()`` of the Work raises it. The
        call itself does if the op cannot start: the group is aborted already, or its
        backend cannot be made.

    Notes
    -----
    The semantics are those of ``torch.distributed.all_reduce``. The reductions by dtype
    and backend, of which ``docs/backends.md`` has the whole tables:

    ==================  =========================  =============================
    dtype               tcp, ucx, mpi, gloo        nccl
    ==================  =========================  =============================
    integers            all but PREMUL_SUM         SUM, AVG, PRODUCT, MIN, MAX;
                                                   of 16 bits none
    bool                all but AVG, PREMUL_SUM    SUM, PRODUCT, MIN, MAX
    floats, bfloat16    all but BAND, BOR, BXOR    all but BAND, BOR, BXOR
    complex             SUM, AVG, PRODUCT;         SUM, AVG
                        on gloo SUM, AVG
    ==================  =========================  =============================

    SUM of bool is "or", PRODUCT "and". Anything else is refused before it is sent. NCCL
    2.24 reduces float8 on GPUs of compute capability 9.0.

    An array is one of numpy or cupy, a tensor of torch on the CPU or on CUDA, or any
    other that exports DLPack. Of a tensor that requires a gradient the data are used,
    and autograd learns nothing of the op. Arrays on CUDA need cupy. The dtypes are
    bool, the integers, floats and complex numbers of numpy in native byte order,
    bfloat16 (of torch or of ml_dtypes, a package that it needs in either case), and on
    NCCL float8 of torch. Of longdouble and clongdouble gloo and NCCL have no
    reductions. All arrays of a call are on one device type, which chooses the backend.

    Each rank checks its own arguments alone. Sizes, dtypes, roots or reductions that
    differ from rank to rank end, by the backend, in an error, in an op that hangs,
    whose cause is then found (``docs/faults.md``), or in wrong data.

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
    # By place: keywords would cost each op 0.2 µs.
    call = Op(OpType.ALL_REDUCE, device, (array,), (array,), tensor, op)
    return pg.issue(call).finish(async_op)


def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce `tensor` over all ranks into `tensor` of rank `dst`.

    The semantics are those of ``torch.distributed.reduce``, except that the arrays of
    the other ranks are never used as scratch memory.

    Parameters
    ----------
    tensor : array
        Read on every rank, written in place on `dst`; the other ranks' arrays keep
        their content. C-contiguous, of one size and dtype on all ranks.
    dst : int, optional
        The destination, by its rank in the world. Either it or `group_dst` is given.
    op, group, async_op : ReduceOp, ProcessGroup, bool, optional
        As for `all_reduce`.
    group_dst : int, optional
        The destination, by its rank in the group, instead of `dst`.

    Returns
    -------
    Work or None
        As from `all_reduce`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_reduce`; also if `dst` and `group_dst` are both given, or neither
        is, or name no rank of the group.

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
    call = Op(
        OpType.REDUCE,
        device,
        (array,),
        (array, root),
        result=tensor if is_root else None,
        reduce_op=op,
        peer=root,
    )
    return pg.issue(call).finish(async_op)


def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``input_list[r]`` of all ranks into `output` of rank r.

    The semantics are those of ``torch.distributed.reduce_scatter``.

    Parameters
    ----------
    output : array
        Written; its size is that of ``input_list[rank]``.
    input_list : list of arrays
        One array per rank, all of one dtype, which are read. Entry r has the size of
        rank r's `output`; sizes may differ from entry to entry.
    op, group, async_op : ReduceOp, ProcessGroup, bool, optional
        As for `all_reduce`.

    Returns
    -------
    Work or None
        As from `all_reduce`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_reduce`; also if a list has not one array for each rank; sizes or
        dtypes of the arrays do not fit.

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
    check_op(op, "reduce_scatter", pg)
    call = Call(OpType.REDUCE_SCATTER, pg)
    inputs = call.take_list(input_list, "input_list", writable=False)
    array = call.take(output, "output")
    call.check_dtypes()
    why = f"the size of input_list[{pg.rank()}], this rank's part"
    call.check_size(array, "output", inputs[pg.rank()].size, why)
    return call.issue((array, inputs), result=output, reduce_op=op).finish(async_op)


def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce `input` over all ranks; `output` of rank r becomes part r of the result.

    The semantics are those of ``torch.distributed.reduce_scatter_tensor``.

    Parameters
    ----------
    output : array
        Written.
    input : array
        Read; world-size times the elements of `output`, of the same dtype. Part r is
        the r-th of world-size equal slices of the flat array.
    op, group, async_op : ReduceOp, ProcessGroup, bool, optional
        As for `all_reduce`.

    Returns
    -------
    Work or None
        As from `all_reduce`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_reduce`; also if sizes or dtypes of the arrays do not fit.

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
    check_op(op, "reduce_scatter_tensor", pg)
    call = Call(OpType.REDUCE_SCATTER_TENSOR, pg)
    source = call.take(input, "input", writable=False)
    array = call.take(output, "output")
    call.check_dtypes()
    why = f"{pg.size()} ranks times {array.size} elements of output"
    call.check_size(source, "input", array.size * pg.size(), why)
    return call.issue((array, source), result=output, reduce_op=op).finish(async_op)


# torch's newer name.
reduce_scatter_single = reduce_scatter_tensor
