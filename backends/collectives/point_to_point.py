"""Send and receive."""

from __future__ import annotations

from ..groups.membership import Group, member_group, resolve_group
from ..interface.op import Op
from ..work.op_type import OpType
from ..work.work import Work
from .arguments import Array, take, take_peer, take_tag

__all__ = ["irecv", "isend", "recv", "send"]


def isend(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start to send `tensor` to rank `dst`; return the Work.

    The semantics are those of ``torch.distributed.isend``: a receive with the same
    `tag` matches the send, in order of issue.

    Parameters
    ----------
    tensor : array
        Read; C-contiguous, of any dtype. It belongs to the op until the Work is over.
    dst : int, optional
        The destination, by its rank in the world. Either it or `group_dst` is given.
    group : ProcessGroup, optional
        The group of both ranks; ``None`` is the default group. On a rank outside the
        group the call only warns.
    tag : int, default 0
        A receive matches the sends with its tag. tcp, ucx and mpi take 0
        to 31999, gloo takes 0 to 2147483647. nccl has no tags: it takes 0 alone.
    group_dst : int, optional
        The destination, by its rank in the group, instead of `dst`.

    Returns
    -------
    Work
        It is over when the array may be used again. On a rank outside the group it is
        ``None``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_reduce`; also if `dst` and `group_dst` are both given, or neither
        is, or name no rank of the group, or this rank itself; the backend does not take
        the `tag`.

    Examples
    --------
    >>> if dist.get_rank() == 0:
    ...     work = dist.isend(np.array([1.0, 2.0]), dst=1)
    ... else:
    ...     x = np.zeros(2)
    ...     work = dist.irecv(x, src=0)
    >>> work.wait()
    True
    """
    return _issue("isend", OpType.SEND, tensor, dst, group, tag, group_dst)


def irecv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start to receive into `tensor` from rank `src`; return the Work.

    The semantics are those of ``torch.distributed.irecv``.

    Parameters
    ----------
    tensor : array
        Written; C-contiguous, of the size and dtype of the array that is sent.
    src : int, optional
        The sender, as its rank in the world; without `src` and `group_src`, any rank,
        which NCCL does not have.
    group, tag : ProcessGroup, int, optional
        As for `isend`.
    group_src : int, optional
        The sender, by its rank in the group, instead of `src`.

    Returns
    -------
    Work
        Its ``source_rank()`` is the sender's rank in the group. On a rank outside the
        group it is ``None``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_reduce`; also if `src` and `group_src` are both given, or name no
        rank of the group, or this rank itself; the backend does not take the `tag`;
        neither is given, and the backend is nccl.

    Examples
    --------
    >>> x = np.zeros(2)
    >>> if dist.get_rank() == 0:
    ...     work = dist.isend(np.array([1.0, 2.0]), dst=1)
    ... else:
    ...     work = dist.irecv(x)  # from any rank
    >>> work.wait()
    True
    >>> if dist.get_rank() == 1:
    ...     assert work.source_rank() == 0 and x.tolist() == [1.0, 2.0]
    """
    return _issue("irecv", OpType.RECV, tensor, src, group, tag, group_src)


def send(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send `tensor` to rank `dst`; return when the array may be used again.

    The semantics are those of ``torch.distributed.send``.

    Parameters
    ----------
    tensor : array
        Read; C-contiguous, of any dtype.
    dst, group, tag, group_dst : int, ProcessGroup, optional
        As for `isend`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `isend`.

    Examples
    --------
    >>> x = np.array([1.0, 2.0]) if dist.get_rank() == 0 else np.zeros(2)
    >>> if dist.get_rank() == 0:
    ...     dist.send(x, dst=1)
    ... else:
    ...     sender = dist.recv(x, src=0)
    >>> x
    array([1., 2.])
    """
    work = _issue("send", OpType.SEND, tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


def recv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive into `tensor` from rank `src`; return the sender's global rank.

    The semantics are those of ``torch.distributed.recv``.

    Parameters
    ----------
    tensor : array
        Written; C-contiguous, of the size and dtype of the array that is sent.
    src : int, optional
        The sender, as its rank in the world; without `src` and `group_src`, any rank,
        which NCCL does not have.
    group, tag, group_src : ProcessGroup, int, optional
        As for `irecv`.

    Returns
    -------
    int
        The sender's rank in the world; -1 on a rank outside the group.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `irecv`.

    Examples
    --------
    >>> x = np.array([1.0, 2.0]) if dist.get_rank() == 0 else np.zeros(2)
    >>> if dist.get_rank() == 0:
    ...     dist.send(x, dst=1, tag=7)
    ... else:
    ...     assert dist.recv(x, tag=7) == 0  # the sender
    >>> x
    array([1., 2.])
    """
    work = _issue("recv", OpType.RECV, tensor, src, group, tag, group_src)
    if work is None:
        return -1
    work.wait()
    if src is not None:
        return src
    ranks = resolve_group(group, "recv").ranks
    sender = work.source_rank() if group_src is None else group_src
    return -1 if sender == -1 else ranks[sender]


def _issue(
    name: str,
    op_type: OpType,
    tensor: Array,
    rank: int | None,
    group: Group,
    tag: int,
    group_rank: int | None,
) -> Work | None:
    """Start the op of the function `name`, to or from one of the two ranks."""
    pg = member_group(group, name)
    if pg is None:
        return None
    receives, peer = op_type is OpType.RECV, None
    if not receives or rank is not None or group_rank is not None:
        argument = "src" if receives else "dst"
        peer = take_peer(pg, rank, group_rank, argument, name, itself=False)
    tag = take_tag(tag, name, pg)
    array, device = take(tensor, "tensor", op_type, pg, writable=receives)
    args, result = (array, peer, tag), peer if receives else None
    work = pg.issue(Op(op_type, device, (array,), args, result, peer=peer, tag=tag))
    work.detach()
    return work
