"""Collectives that move arrays without arithmetic, and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ..devices.cuda_device import device_index
from ..groups.membership import Group, member_group
from ..interface.op import Op
from ..quantities import as_positive_seconds
from ..work.op_timeout import op_timeout
from ..work.op_type import OpType
from ..work.work import Work
from .arguments import Array, Call, Place, take, take_device, take_peer, take_splits

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "scatter",
]


def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy `tensor` of rank `src` into every other rank's `tensor`.

    The semantics are those of ``torch.distributed.broadcast``.

    Parameters
    ----------
    tensor : array
        Read on `src`, written in place on every other rank. C-contiguous, of any
        dtype; size and dtype are the same on all ranks.
    src : int, optional
        The source, by its rank in the world. Either it or `group_src` is given.
    group, async_op : ProcessGroup, bool, optional
        As for `all_reduce`.
    group_src : int, optional
        The source, by its rank in the group, instead of `src`.

    Returns
    -------
    Work or None
        As from `all_reduce`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_reduce`; also if `src` and `group_src` are both given, or neither
        is, or name no rank of the group.

    Examples
    --------
    >>> x = np.arange(3)
    >>> dist.broadcast(x, src=0)
    >>> x
    array([0, 1, 2])
    """
    pg = member_group(group, "broadcast")
    if pg is None:
        return None
    root = take_peer(pg, src, group_src, "src", "broadcast")
    array, device = take(
        tensor, "tensor", OpType.BROADCAST, pg, writable=pg.rank() != root
    )
    call = Op(
        OpType.BROADCAST, device, (array,), (array, root), peer=root, result=tensor
    )
    return pg.issue(call).finish(async_op)


def all_gather(
    tensor_list: Sequence[Array],
    tensor: Array,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Copy `tensor` of rank r into ``tensor_list[r]``, on every rank.

    The semantics are those of ``torch.distributed.all_gather``.

    Parameters
    ----------
    tensor_list : list of arrays
        Written; one array per rank. ``tensor_list[r]`` has the size of rank r's
        `tensor`; sizes may differ from rank to rank.
    tensor : array
        Read; of any dtype, the same as that of `tensor_list`.
    group, async_op : ProcessGroup, bool, optional
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
    >>> parts = [np.empty(2)]
    >>> dist.all_gather(parts, np.array([1.0, 2.0]))
    >>> parts
    [array([1., 2.])]
    """
    pg = member_group(group, "all_gather")
    if pg is None:
        return None
    call = Call(OpType.ALL_GATHER, pg)
    array = call.take(tensor, "tensor", writable=False)
    outputs = call.take_list(tensor_list, "tensor_list")
    call.check_dtypes()
    own, name = outputs[pg.rank()], f"tensor_list[{pg.rank()}]"
    call.check_size(own, name, array.size, "the size of this rank's tensor")
    return call.issue((outputs, array), result=list(tensor_list)).finish(async_op)


def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Concatenate all ranks' `input_tensor` in `output_tensor`, in order of rank.

    The semantics are those of ``torch.distributed.all_gather_into_tensor``.

    Parameters
    ----------
    output_tensor : array
        Written; world-size times the elements of `input_tensor`, in any shape.
    input_tensor : array
        Read; of any dtype, and of one size and dtype on all ranks.
    group, async_op : ProcessGroup, bool, optional
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
    >>> out = np.empty((1, 2))
    >>> dist.all_gather_into_tensor(out, np.array([1.0, 2.0]))
    >>> out
    array([[1., 2.]])
    """
    pg = member_group(group, "all_gather_into_tensor")
    if pg is None:
        return None
    call = Call(OpType.ALL_GATHER_INTO_TENSOR, pg)
    array = call.take(input_tensor, "input_tensor", writable=False)
    output = call.take(output_tensor, "output_tensor")
    call.check_dtypes()
    why = f"{pg.size()} ranks times {array.size} elements of input_tensor"
    call.check_size(output, "output_tensor", array.size * pg.size(), why)
    return call.issue((output, array), result=output_tensor).finish(async_op)


def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copy `tensor` of rank r into ``gather_list[r]`` of rank `dst` (default 0).

    The semantics are those of ``torch.distributed.gather``.

    Parameters
    ----------
    tensor : array
        Read; of any dtype, and of one size and dtype on all ranks.
    gather_list : list of arrays, optional
        Written; one array per rank, each of the size of `tensor`. Given on `dst` and
        on no other rank.
    dst : int, optional
        The destination, by its rank in the world. By default it is rank 0 of the world,
        or the first rank of a group without it.
    group, async_op : ProcessGroup, bool, optional
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
        As from `all_reduce`; also if `dst` and `group_dst` are both given, or name no
        rank of the group; the list is missing on the root, is given on another rank, or
        has not one array for each rank; sizes or dtypes of the arrays do not fit.

    Examples
    --------
    >>> parts = [np.empty(2)]
    >>> dist.gather(np.array([1.0, 2.0]), parts, dst=0)
    >>> parts
    [array([1., 2.])]
    """
    pg = member_group(group, "gather")
    if pg is None:
        return None
    root = take_peer(pg, dst, group_dst, "dst", "gather", default=0)
    call = Call(OpType.GATHER, pg)
    array = call.take(tensor, "tensor", writable=False)
    outputs = call.take_root_list(gather_list, "gather_list", root)
    call.check_dtypes()
    call.check_sizes(outputs or (), "gather_list", array.size)
    args = array, outputs, root
    result = gather_list and list(gather_list)
    return call.issue(args, peer=root, result=result).finish(async_op)


def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy ``scatter_list[r]`` of rank `src` (default 0) into `tensor` of rank r.

    The semantics are those of ``torch.distributed.scatter``.

    Parameters
    ----------
    tensor : array
        Written; of any dtype, and of one size and dtype on all ranks.
    scatter_list : list of arrays, optional
        Read; one array per rank, each of the size of `tensor`. Given on `src` and on
        no other rank.
    src : int, optional
        The source, by its rank in the world. By default it is rank 0 of the world, or
        the first rank of a group without it.
    group, async_op : ProcessGroup, bool, optional
        As for `all_reduce`.
    group_src : int, optional
        The source, by its rank in the group, instead of `src`.

    Returns
    -------
    Work or None
        As from `all_reduce`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_reduce`; also if `src` and `group_src` are both given, or name no
        rank of the group; the list is missing on the root, is given on another rank, or
        has not one array for each rank; sizes or dtypes of the arrays do not fit.

    Examples
    --------
    >>> x = np.empty(2)
    >>> dist.scatter(x, [np.array([1.0, 2.0])], src=0)
    >>> x
    array([1., 2.])
    """
    pg = member_group(group, "scatter")
    if pg is None:
        return None
    root = take_peer(pg, src, group_src, "src", "scatter", default=0)
    call = Call(OpType.SCATTER, pg)
    inputs = call.take_root_list(scatter_list, "scatter_list", root, writable=False)
    array = call.take(tensor, "tensor")
    call.check_dtypes()
    call.check_sizes(inputs or (), "scatter_list", array.size)
    args = array, inputs, root
    return call.issue(args, peer=root, result=tensor).finish(async_op)


def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[Array],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Copy ``input_tensor_list[q]`` of rank r to ``output_tensor_list[r]`` of rank q.

    The semantics are those of ``torch.distributed.all_to_all``.

    Parameters
    ----------
    output_tensor_list : list of arrays
        Written; one array per rank. Entry r has the size of what rank r sends here.
    input_tensor_list : list of arrays
        Read; one array per rank, of any size, and of one dtype on all ranks.
    group, async_op : ProcessGroup, bool, optional
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
    >>> received = [np.empty(2)]
    >>> dist.all_to_all(received, [np.array([1.0, 2.0])])
    >>> received
    [array([1., 2.])]
    """
    pg = member_group(group, "all_to_all")
    if pg is None:
        return None
    call = Call(OpType.ALL_TO_ALL, pg)
    inputs = call.take_list(input_tensor_list, "input_tensor_list", writable=False)
    outputs = call.take_list(output_tensor_list, "output_tensor_list")
    call.check_dtypes()
    own = pg.rank()
    call.check_own_part(outputs[own].size, inputs[own].size)
    return call.issue((outputs, inputs), result=list(output_tensor_list)).finish(
        async_op
    )


def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Split `input` along dimension 0, send part r to rank r, concatenate in `output`.

    The semantics are those of ``torch.distributed.all_to_all_single``.

    Parameters
    ----------
    output : array
        Written; it has the shape of `input` after dimension 0, and its dtype.
    input : array
        Read; of any dtype, the same on all ranks.
    output_split_sizes : list of int, optional
        Rows of dimension 0 of `output` that each rank sends here. Without it the rows
        are split evenly: their number is divisible by the world size.
    input_split_sizes : list of int, optional
        Rows of dimension 0 of `input` for each rank; evenly split without it.
    group, async_op : ProcessGroup, bool, optional
        As for `all_reduce`.

    Returns
    -------
    Work or None
        As from `all_reduce`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_reduce`; also if the sizes of a split are not one integer for each
        rank, or do not add up to dimension 0; without sizes, dimension 0 cannot be
        split evenly; sizes or dtypes of the arrays do not fit.

    Examples
    --------
    >>> out = np.empty(2)
    >>> dist.all_to_all_single(out, np.array([1.0, 2.0]))
    >>> out
    array([1., 2.])
    """
    pg = member_group(group, "all_to_all_single")
    if pg is None:
        return None
    call = Call(OpType.ALL_TO_ALL_SINGLE, pg)
    source = call.take(input, "input", writable=False)
    target = call.take(output, "output")
    call.check_dtypes()
    sends = take_splits(source, input_split_sizes, "input", call)
    receives = take_splits(target, output_split_sizes, "output", call)
    if source.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"{call}: output has shape {tuple(target.shape)}, input "
            f"{tuple(source.shape)}; expected the same shape after dimension 0"
        )
    own = pg.rank()
    call.check_own_part(receives[own], sends[own])
    args, splits = (target, source, receives, sends), (receives, sends)
    return call.issue(args, result=output, splits=splits).finish(async_op)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: float | timedelta | None = None,
    device: Any = None,
) -> Work | None:
    """Block until every rank of the group has entered.

    The semantics are those of ``torch.distributed.barrier``. The host blocks, over NCCL
    too. `monitored_barrier` names the ranks that are missing.

    Parameters
    ----------
    group : ProcessGroup, optional
        As for `all_reduce`.
    async_op : bool, default False
        Return a `Work` at once, whose ``wait()`` blocks until every rank has entered.
    device_ids : list of int, optional
        The one CUDA device that runs the barrier, ``[0]``. For a group with a backend
        for ``cuda`` in which no op has used a device before.
    timeout : float or timedelta, optional
        Seconds after which this barrier fails, in the place of the group's timeout.
    device : str or torch.device, optional
        The device type whose backend runs the barrier: ``"cuda"`` or ``"cuda:0"``.
        Default: the first device type of the group.

    Returns
    -------
    Work or None
        The Work with ``async_op=True``, else ``None`` after every rank has entered. On
        a rank outside the group it is ``None``.

    Raises
    ------
    TypeError, ValueError
        There is no default group (`init_process_group` makes it), and `group` is
        ``None``; `group` is no group; `device` or `device_ids` names no device of the
        group's; `timeout` is no positive duration. This rank has not entered then.
    NotImplementedError
        The backend has no barrier.
    DistTimeoutError
        Ranks did not enter within the timeout.
    DistAbortedError, DistBackendError
        The group was aborted, or the backend failed. With ``async_op=True``
        ``wait()`` of the Work raises the errors of the barrier. The call itself does
        where it cannot start: the group is aborted already, or its backend cannot be
        made.

    Examples
    --------
    >>> dist.barrier()
    """
    pg = member_group(group, "barrier")
    if pg is None:
        return None
    where = Place(OpType.BARRIER, pg)
    kind, index = pg.first_device(), None
    if device is not None:
        kind, index = take_device(device, where)
    if device_ids is not None:
        if not isinstance(device_ids, (list, tuple)):
            raise TypeError(f"{where}: device_ids={device_ids!r}; expected a list")
        if len(device_ids) != 1:
            raise ValueError(f"{where}: device_ids={device_ids!r}; expected one device")
        kind, index = "cuda", device_index(device_ids[0], str(where))

    op = _Barrier(kind, index)
    if timeout is None:
        return pg.issue(op).finish(async_op)
    with op_timeout(as_positive_seconds(timeout, f"{where}: timeout")):
        work = pg.issue(op)
    return work.finish(async_op)


class _Barrier(Op):
    """A barrier of a device type, on the device `index` where one is given."""

    __slots__ = ("index",)

    def __init__(self, device: str, index: int | None) -> None:
        super().__init__(OpType.BARRIER, device, (), ())
        self.index = index

    def start(self) -> Work:
        if self.index is not None:
            self.backend.prepare(index=self.index)
        return super().start()


# torch's newer name.
all_gather_single = all_gather_into_tensor
