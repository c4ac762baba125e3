"""Send and receive."""

from __future__ import annotations

from ..groups.api import Group, resolve_group
from ..interface.op import Op
from ..work.op_type import OpType
from ..work.work import Work
from .arguments import Array, check_tag, take, take_peer

__all__ = ["irecv", "isend", "recv", "send"]


def isend(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Start sending `tensor` to rank `dst`; return the Work.

    It is matched by a receive with the same `tag`, in order of issue.
    """
    pg = resolve_group(group, "isend")
    peer = take_peer(pg, dst, group_dst, "dst", "isend", itself=False)
    check_tag(tag, "isend", pg)
    array, device = take(tensor, "tensor", OpType.SEND, pg, writable=False)
    work = pg.issue(
        Op(
            OpType.SEND,
            device,
            (array,),
            (array, peer, tag),
            peer=peer,
        )
    )
    work.detach()
    return work


def irecv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Start receiving into `tensor` from rank `src` (default: any); return the Work.

    The Work's result is the sender's rank in the group.
    """
    pg = resolve_group(group, "irecv")
    peer = None
    if src is not None or group_src is not None:
        peer = take_peer(pg, src, group_src, "src", "irecv", itself=False)
    check_tag(tag, "irecv", pg)
    array, device = take(tensor, "tensor", OpType.RECV, pg)
    work = pg.issue(
        Op(
            OpType.RECV,
            device,
            (array,),
            (array, peer, tag),
            peer=peer,
            result=peer,
        )
    )
    work.detach()
    return work


def send(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send `tensor` to rank `dst`; return when the array may be used again."""
    isend(tensor, dst, group, tag, group_dst).wait()


def recv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive into `tensor` from rank `src` (default: any); return its global rank."""
    work = irecv(tensor, src, group, tag, group_src)
    work.wait()
    if src is not None:
        return src
    ranks = resolve_group(group, "recv").ranks
    sender = group_src if group_src is not None else work.result()
    return -1 if sender is None else ranks[sender]
