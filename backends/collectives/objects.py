"""Object collectives: any picklable Python object, over the array collectives.

Objects are pickled with protocol 5. Large buffers (arrays, for example) are
pickled out of band, which avoids a copy into the pickle. An object that cannot be
pickled ends the op on all ranks: its rank sends the reason in its place, and raises.
Unpickling runs code that the sender chose: a rank may refuse to unpickle with
:func:`refuse_pickles`, and then every object sent to that rank raises there once the
op has ended on all ranks.

The bytes travel through host memory where the group has a backend for it, else
through arrays on the group's first device type. A parameter `device` selects
another device type of the group. A device without an index is the device of the
group's first op, else the current device. Every error names the public function
that was called.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..devices.arrays import check_list
from ..errors import DistError
from ..groups.membership import Group, member_group
from ..groups.process_group import ProcessGroup
from ..work.op_type import OpType
from .arguments import Place, take_peer, take_tag
from .object_transport import ObjectTransport

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "refuse_pickles",
    "scatter_object_list",
    "send_object_list",
]

# Flat arrays of bytes. A more precise type is not portable: numpy's stubs differ.
Bytes = Any

_refused = False


def refuse_pickles(refuse: bool = True) -> None:
    """Refuse to unpickle objects of other ranks on this rank, or allow it again.

    Unpickling runs code that the sender chose. ``torch.distributed`` has no such
    function.

    Parameters
    ----------
    refuse : bool, default True
        Whether an object that arrives raises `DistError` instead of being unpickled.

    Examples
    --------
    >>> dist.refuse_pickles()
    >>> try:
    ...     dist.all_gather_object([None, None], "text")
    ... except dist.DistError:
    ...     print("refused")
    refused
    >>> dist.refuse_pickles(False)
    """
    global _refused
    _refused = refuse


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Set ``object_list[r]`` to `obj` of rank r, on every rank.

    The semantics are those of ``torch.distributed.all_gather_object``.

    Parameters
    ----------
    object_list : list
        Written in place: one entry for each rank of the group.
    obj : object
        Picklable. The own entry is `obj` itself, not a copy.
    group : ProcessGroup, optional
        As for `all_reduce`.

    Raises
    ------
    TypeError, ValueError
        As from `all_reduce`; also if `object_list` has not one entry for each rank;
        `obj` cannot be pickled; the call is in a block of `coalescing_manager`.
    NotImplementedError
        The backend lacks an op that the bytes are sent by.
    DistError
        An object cannot be pickled on its rank, or unpickled here, or this rank
        refuses pickles (`refuse_pickles`): the op has ended on all ranks then. Or the
        op failed, as in `all_reduce`.

    Examples
    --------
    >>> objects = [None] * dist.get_world_size()
    >>> dist.all_gather_object(objects, {"loss": 0.5})
    >>> objects
    [{'loss': 0.5}]
    """
    pg = member_group(group, "all_gather_object")
    if pg is None:
        return
    where = Place("all_gather_object", pg)
    check_list(object_list, "object_list", pg.size(), where, replaced=True)
    mine = _pack(obj, "obj", where)
    transport = ObjectTransport(where, OpType.ALL_GATHER)
    sizes = _sizes(mine.data, transport, pg)
    parts = [np.empty(size, np.uint8) for size in sizes]
    transport.all_gather(parts, mine.data)
    mine.check()
    object_list[:] = [
        obj if rank == pg.rank() else _unpack(part, pg.ranks[rank], where)
        for rank, part in enumerate(parts)
    ]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Replace the entries of `object_list` by those of rank `src`.

    The semantics are those of ``torch.distributed.broadcast_object_list``.

    Parameters
    ----------
    object_list : list
        Picklable objects, read on `src` and replaced in place on the other ranks; of
        the same length, at least 1, on all ranks.
    src : int, optional
        The source, by its rank in the world. By default it is rank 0 of the world, or
        the first rank of a group without it.
    group : ProcessGroup, optional
        As for `all_reduce`.
    device : str or torch.device, optional
        The device type of the group whose backend carries the bytes, the same on all
        ranks, as ``"cpu"`` or ``"cuda:1"``; ``None`` is host memory where the group has
        a backend for it, else its first device type.
    group_src : int, optional
        The source, by its rank in the group, instead of `src`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_gather_object`; also if `src` and `group_src` are both given, or
        name no rank of the group; two ranks' lists have other lengths, which are
        compared after the transfer.

    Examples
    --------
    >>> settings = ["adam", {"lr": 0.1}] if dist.get_rank() == 0 else [None, None]
    >>> dist.broadcast_object_list(settings)
    >>> settings
    ['adam', {'lr': 0.1}]
    """
    pg = member_group(group, "broadcast_object_list")
    if pg is None:
        return
    where = Place("broadcast_object_list", pg)
    root = take_peer(pg, src, group_src, "src", "broadcast_object_list", default=0)
    _check_objects(object_list, "object_list", where, replaced=pg.rank() != root)
    transport = ObjectTransport(where, OpType.BROADCAST, device)
    mine = _Pickle(np.empty(0, np.uint8))
    header = np.zeros(2, np.int64)
    if pg.rank() == root:
        mine = _pack(object_list, "object_list", where)
        header[:] = len(object_list), mine.data.size
    transport.broadcast(header, root)
    count, size = header.tolist()
    data = mine.data if pg.rank() == root else np.empty(size, np.uint8)
    transport.broadcast(data, root)
    mine.check()
    _fill(object_list, data, count, root, pg, where)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Set ``object_gather_list[r]`` on rank `dst` to `obj` of rank r.

    The semantics are those of ``torch.distributed.gather_object``. Every rank sends
    as many bytes as the largest pickle has.

    Parameters
    ----------
    obj : object
        Picklable. On `dst` the own entry is `obj` itself, not a copy.
    object_gather_list : list, optional
        On `dst` one entry for each rank of the group, written in place; not used on
        the other ranks.
    dst : int, optional
        The destination, by its rank in the world. By default it is rank 0 of the world,
        or the first rank of a group without it.
    group : ProcessGroup, optional
        As for `all_reduce`.
    group_dst : int, optional
        The destination, by its rank in the group, instead of `dst`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_gather_object`; also if `dst` and `group_dst` are both given, or
        name no rank of the group.

    Examples
    --------
    >>> objects = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    >>> dist.gather_object("from rank 0", objects)
    >>> objects
    ['from rank 0']
    """
    pg = member_group(group, "gather_object")
    if pg is None:
        return
    where = Place("gather_object", pg)
    root = take_peer(pg, dst, group_dst, "dst", "gather_object", default=0)
    if pg.rank() == root:
        check_list(
            object_gather_list, "object_gather_list", pg.size(), where, replaced=True
        )
    mine = _pack(obj, "obj", where)
    transport = ObjectTransport(where, OpType.GATHER)
    sizes = _sizes(mine.data, transport, pg)
    # gather needs equal sizes: shorter pickles are padded here and cut at `dst`.
    widest = int(sizes.max())
    padded = np.zeros(widest, np.uint8)
    padded[: mine.data.size] = mine.data
    rows = None
    if pg.rank() == root:
        rows = list(np.empty((pg.size(), widest), np.uint8))
    transport.gather(padded, rows, root)
    mine.check()
    if rows is not None and object_gather_list is not None:
        object_gather_list[:] = [
            obj if rank == pg.rank() else _unpack(row[:size], pg.ranks[rank], where)
            for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))
        ]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Set the first entry of the output list to entry `rank` of `src`'s input list.

    The semantics are those of ``torch.distributed.scatter_object_list``. Every rank
    receives as many bytes as the largest pickle has.

    Parameters
    ----------
    scatter_object_output_list : list
        Its first entry is written in place; at least one entry.
    scatter_object_input_list : sequence, optional
        On `src` one picklable object for each rank of the group; not used on the
        other ranks.
    src : int, optional
        The source, by its rank in the world. By default it is rank 0 of the world, or
        the first rank of a group without it.
    group : ProcessGroup, optional
        As for `all_reduce`.
    group_src : int, optional
        The source, by its rank in the group, instead of `src`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_gather_object`; also if `src` and `group_src` are both given, or
        name no rank of the group.

    Examples
    --------
    >>> mine = [None]
    >>> dist.scatter_object_list(mine, [{"shard": 0}])
    >>> mine
    [{'shard': 0}]
    """
    pg = member_group(group, "scatter_object_list")
    if pg is None:
        return
    where = Place("scatter_object_list", pg)
    root = take_peer(pg, src, group_src, "src", "scatter_object_list", default=0)
    _check_objects(
        scatter_object_output_list, "scatter_object_output_list", where, replaced=True
    )
    parts: list[_Pickle] = []
    sizes = np.zeros(pg.size(), np.int64)
    if pg.rank() == root:
        check_list(
            scatter_object_input_list, "scatter_object_input_list", pg.size(), where
        )
        parts = [
            _pack(obj, f"scatter_object_input_list[{i}]", where)
            for i, obj in enumerate(scatter_object_input_list or ())
        ]
        # One that cannot be pickled ends the op on every rank, and not on its own.
        failed = next((part for part in parts if part.error is not None), None)
        parts = parts if failed is None else [failed] * len(parts)
        sizes[:] = [part.data.size for part in parts]
    transport = ObjectTransport(where, OpType.SCATTER)
    transport.broadcast(sizes, root)
    widest = int(sizes.max())
    rows = None
    if pg.rank() == root:
        table = np.zeros((pg.size(), widest), np.uint8)
        for row, part in zip(table, parts, strict=True):
            row[: part.data.size] = part.data
        rows = list(table)
    mine = np.empty(widest, np.uint8)
    transport.scatter(mine, rows, root)
    for part in parts:
        part.check()
    if pg.rank() == root and scatter_object_input_list is not None:
        scatter_object_output_list[0] = scatter_object_input_list[root]
    else:
        data = mine[: sizes[pg.rank()]]
        scatter_object_output_list[0] = _unpack(data, pg.ranks[root], where)


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    tag: int = 0,
) -> None:
    """Send the entries of `object_list` to rank `dst`.

    The semantics are those of ``torch.distributed.send_object_list``.

    Parameters
    ----------
    object_list : sequence
        Picklable objects, at least one; the receiver's list has as many entries.
    dst, group : int, ProcessGroup, optional
        As for `isend`.
    device : str, optional
        As for `broadcast_object_list`.
    group_dst : int, optional
        As for `isend`.
    use_batch : bool, default False
        Not used: accepted for c10d's signature. No backend connects two ranks apart
        from the rest of the group, which is what c10d spares NCCL by it.
    tag : int, optional
        As for `isend`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_gather_object` and `isend`.

    Examples
    --------
    >>> objects = ["text", {"a": 1}] if dist.get_rank() == 0 else [None, None]
    >>> if dist.get_rank() == 0:
    ...     dist.send_object_list(objects, dst=1)
    ... else:
    ...     sender = dist.recv_object_list(objects, src=0)
    >>> objects
    ['text', {'a': 1}]
    """
    pg = member_group(group, "send_object_list")
    if pg is None:
        return
    where = Place("send_object_list", pg)
    peer = take_peer(pg, dst, group_dst, "dst", "send_object_list", itself=False)
    tag = take_tag(tag, "send_object_list", pg)
    _check_objects(object_list, "object_list", where)
    mine = _pack(list(object_list), "object_list", where)
    header = np.array([len(object_list), mine.data.size], np.int64)
    transport = ObjectTransport(where, OpType.SEND, device)
    transport.send(header, peer, tag)
    transport.send(mine.data, peer, tag)
    mine.check()


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    tag: int = 0,
) -> int:
    """Receive into `object_list` from rank `src`.

    The semantics are those of ``torch.distributed.recv_object_list``.

    Parameters
    ----------
    object_list : list
        Its entries are replaced in place; as many as the sender's list has.
    src : int, optional
        The source, as its rank in the world; ``None``, where `group_src` is ``None``
        too, receives from any rank, which NCCL cannot do.
    group : ProcessGroup, optional
        As for `isend`.
    device : str, optional
        As for `broadcast_object_list`.
    group_src : int, optional
        The source, by its rank in the group, instead of `src`.
    use_batch, tag : bool, int, optional
        As for `send_object_list`.

    Returns
    -------
    int
        The sender, as its rank in the world; -1 on a rank outside the group.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, DistError
        As from `all_gather_object` and `irecv`; also if two ranks' lists have other
        lengths, which are compared after the transfer.

    Examples
    --------
    >>> objects = ["text", {"a": 1}] if dist.get_rank() == 0 else [None, None]
    >>> if dist.get_rank() == 0:
    ...     dist.send_object_list(objects, dst=1)
    ... else:
    ...     sender = dist.recv_object_list(objects, src=0)
    >>> objects
    ['text', {'a': 1}]
    """
    pg = member_group(group, "recv_object_list")
    if pg is None:
        return -1
    where = Place("recv_object_list", pg)
    peer = None
    if src is not None or group_src is not None:
        peer = take_peer(pg, src, group_src, "src", "recv_object_list", itself=False)
    tag = take_tag(tag, "recv_object_list", pg)
    _check_objects(object_list, "object_list", where, replaced=True)
    transport = ObjectTransport(where, OpType.RECV, device)
    header = np.empty(2, np.int64)
    sender = transport.recv(header, peer, tag)
    count, size = header.tolist()
    data = np.empty(size, np.uint8)
    transport.recv(data, sender, tag)
    _fill(object_list, data, count, sender, pg, where)
    return pg.ranks[sender]


# -- pickles -----------------------------------------------------------------


def _sizes(mine: Bytes, transport: ObjectTransport, pg: ProcessGroup) -> Any:
    """Return the size in bytes of `mine` on every rank."""
    sizes = np.empty(pg.size(), np.int64)
    transport.all_gather(list(sizes.reshape(-1, 1)), np.array([mine.size], np.int64))
    return sizes


def _check_objects(
    value: Any, argument: str, where: Place, *, replaced: bool = False
) -> None:
    listed = isinstance(value, list if replaced else (list, tuple))
    if not listed or not value:
        raise (ValueError if listed else TypeError)(
            f"{where}: {argument} is {value!r}; expected a list of at least one entry"
        )


@dataclasses.dataclass
class _Pickle:
    """What a rank sends for an object: its pickle, or why there is none."""

    data: Bytes
    error: TypeError | None = None

    def check(self) -> None:
        """Raise on the sender, once the other ranks have the reason."""
        if self.error is not None:
            raise self.error


def _pack(obj: Any, argument: str, where: Place) -> _Pickle:
    """Return `obj` as bytes: count and sizes of the parts, the pickle, its buffers.

    The count is 0 where `obj` cannot be pickled, and the reason follows.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        head = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    except Exception as cause:  # noqa: BLE001  sent, and raised by check()
        reason = f"{argument} cannot be pickled: {cause}"
        error = TypeError(f"{where}: {reason}")
        error.__cause__ = cause
        text = struct.pack("<Q", 0) + reason.encode(errors="replace")
        return _Pickle(np.frombuffer(text, np.uint8).copy(), error)
    sizes = struct.pack(
        f"<{len(parts) + 1}Q", len(parts), *(part.nbytes for part in parts)
    )
    total = len(sizes) + sum(part.nbytes for part in parts)
    data = np.empty(total, np.uint8)
    start = 0
    for part in (memoryview(sizes), *parts):
        data[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
        start += part.nbytes
    return _Pickle(data)


def _unpack(data: Bytes, sender: int, where: Place) -> Any:
    (count,) = struct.unpack_from("<Q", data)
    if count == 0:
        reason = data[8:].tobytes().decode(errors="replace")
        raise DistError(f"{where}: rank {sender} has nothing to send: its {reason}")
    if _refused:
        raise DistError(
            f"{where}: rank {sender} sent a pickled object, and this rank refuses "
            "them (refuse_pickles(False) allows them)"
        )
    sizes = struct.unpack_from(f"<{count}Q", data, 8)
    ends = list(itertools.accumulate(sizes, initial=8 * (count + 1)))
    # Each buffer is copied: aligned, and one buffer does not keep the others alive.
    parts = [data[a:b].copy() for a, b in itertools.pairwise(ends)]
    try:
        return pickle.loads(parts[0].data, buffers=[part.data for part in parts[1:]])
    except Exception as error:
        raise DistError(
            f"{where}: the object that rank {sender} sent cannot be unpickled: {error}"
        ) from error


def _fill(
    target: list[Any],
    data: Bytes,
    count: int,
    sender: int,
    pg: ProcessGroup,
    where: Place,
) -> None:
    if count != len(target):
        raise ValueError(
            f"{where}: object_list has {len(target)} entries, that of rank "
            f"{pg.ranks[sender]} has {count}; expected one length"
        )
    if sender != pg.rank():
        target[:] = _unpack(data, pg.ranks[sender], where)
