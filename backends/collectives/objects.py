"""Object collectives: any picklable Python object, over the array collectives.

Objects are pickled with protocol 5. Large buffers (arrays, for example) are
pickled out of band, which avoids a copy into the pickle. Unpickling runs code that
the sender chose: a rank may refuse to unpickle with :func:`refuse_pickles`, and
then every object sent to that rank raises there once the op has ended on all ranks.

The bytes travel through host memory where the group has a backend for it, else
through arrays on the group's first device type. A parameter `device` selects
another device type of the group, the same on all ranks: ``'cpu'``, ``'cuda'``,
``'cuda:1'``, a ``torch.device``. A device without a backend in the group raises
`ValueError`. A device without an index is the device of the group's first op,
else the current device. Every error names the public function that was called.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..devices.arrays import check_list
from ..errors import DistError
from ..groups.membership import Group, resolve_group
from ..groups.process_group import ProcessGroup
from ..work.op_type import OpType
from .arguments import Place, check_tag, take_peer
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
    """Refuse to unpickle objects of other ranks on this rank, or allow it again."""
    global _refused
    _refused = refuse


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Set ``object_list[r]`` to `obj` of rank r; the list has world-size entries."""
    pg = resolve_group(group, "all_gather_object")
    where = Place("all_gather_object", pg)
    check_list(object_list, "object_list", pg.size(), where)
    mine = _pack(obj, "obj", where)
    transport = ObjectTransport(where, OpType.ALL_GATHER)
    sizes = _sizes(mine, transport, pg)
    parts = [np.empty(size, np.uint8) for size in sizes]
    transport.all_gather(parts, mine)
    object_list[:] = [
        obj if rank == pg.rank else _unpack(part, pg.ranks[rank], where)
        for rank, part in enumerate(parts)
    ]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Replace the entries of `object_list` by those of rank `src` (default 0).

    The list has the same length on all ranks. `device`: see this module.
    """
    pg = resolve_group(group, "broadcast_object_list")
    where = Place("broadcast_object_list", pg)
    root = take_peer(pg, src, group_src, "src", "broadcast_object_list", default=0)
    _check_objects(object_list, "object_list", where)
    transport = ObjectTransport(where, OpType.BROADCAST, device)
    data = np.empty(0, np.uint8)
    header = np.zeros(2, np.int64)
    if pg.rank == root:
        data = _pack(object_list, "object_list", where)
        header[:] = len(object_list), data.size
    transport.broadcast(header, root)
    count, size = header.tolist()
    if pg.rank != root:
        data = np.empty(size, np.uint8)
    transport.broadcast(data, root)
    _fill(object_list, data, count, root, pg, where)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Set ``object_gather_list[r]`` on rank `dst` (default 0) to `obj` of rank r."""
    pg = resolve_group(group, "gather_object")
    where = Place("gather_object", pg)
    root = take_peer(pg, dst, group_dst, "dst", "gather_object", default=0)
    if pg.rank == root:
        check_list(object_gather_list, "object_gather_list", pg.size(), where)
    mine = _pack(obj, "obj", where)
    transport = ObjectTransport(where, OpType.GATHER)
    sizes = _sizes(mine, transport, pg)
    # gather needs equal sizes: shorter pickles are padded here and cut at `dst`.
    widest = int(sizes.max())
    padded = np.zeros(widest, np.uint8)
    padded[: mine.size] = mine
    rows = None
    if pg.rank == root:
        rows = list(np.empty((pg.size(), widest), np.uint8))
    transport.gather(padded, rows, root)
    if rows is not None and object_gather_list is not None:
        object_gather_list[:] = [
            obj if rank == pg.rank else _unpack(row[:size], pg.ranks[rank], where)
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

    `scatter_object_input_list` has world-size entries and is read on `src` alone
    (default 0); the output list has at least one entry.
    """
    pg = resolve_group(group, "scatter_object_list")
    where = Place("scatter_object_list", pg)
    root = take_peer(pg, src, group_src, "src", "scatter_object_list", default=0)
    _check_objects(scatter_object_output_list, "scatter_object_output_list", where)
    parts: list[Bytes] = []
    sizes = np.zeros(pg.size(), np.int64)
    if pg.rank == root:
        check_list(
            scatter_object_input_list, "scatter_object_input_list", pg.size(), where
        )
        parts = [
            _pack(obj, f"scatter_object_input_list[{i}]", where)
            for i, obj in enumerate(scatter_object_input_list or ())
        ]
        sizes[:] = [part.size for part in parts]
    transport = ObjectTransport(where, OpType.SCATTER)
    transport.broadcast(sizes, root)
    widest = int(sizes.max())
    rows = None
    if pg.rank == root:
        table = np.zeros((pg.size(), widest), np.uint8)
        for row, part in zip(table, parts, strict=True):
            row[: part.size] = part
        rows = list(table)
    mine = np.empty(widest, np.uint8)
    transport.scatter(mine, rows, root)
    if pg.rank == root and scatter_object_input_list is not None:
        scatter_object_output_list[0] = scatter_object_input_list[root]
    else:
        data = mine[: sizes[pg.rank]]
        scatter_object_output_list[0] = _unpack(data, pg.ranks[root], where)


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send the entries of `object_list` to rank `dst`. `device`: see this module."""
    pg = resolve_group(group, "send_object_list")
    where = Place("send_object_list", pg)
    peer = take_peer(pg, dst, group_dst, "dst", "send_object_list", itself=False)
    check_tag(tag, "send_object_list", pg)
    _check_objects(object_list, "object_list", where)
    data = _pack(list(object_list), "object_list", where)
    header = np.array([len(object_list), data.size], np.int64)
    transport = ObjectTransport(where, OpType.SEND, device)
    transport.send(header, peer, tag)
    transport.send(data, peer, tag)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive into `object_list` from rank `src` (default: any); return its rank.

    NCCL cannot receive from any rank and has no tags. `device`: see this module.
    """
    pg = resolve_group(group, "recv_object_list")
    where = Place("recv_object_list", pg)
    peer = None
    if src is not None or group_src is not None:
        peer = take_peer(pg, src, group_src, "src", "recv_object_list", itself=False)
    check_tag(tag, "recv_object_list", pg)
    _check_objects(object_list, "object_list", where)
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


def _check_objects(value: Any, argument: str, where: Place) -> None:
    if not isinstance(value, (list, tuple)) or not value:
        raise TypeError(
            f"{where}: {argument} is {value!r}; expected a list of at least one entry"
        )


def _pack(obj: Any, argument: str, where: Place) -> Bytes:
    """Return `obj` as bytes: count and sizes of the parts, the pickle, its buffers."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        head = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    except Exception as error:
        raise TypeError(f"{where}: {argument} cannot be pickled: {error}") from error
    sizes = struct.pack(
        f"<{len(parts) + 1}Q", len(parts), *(part.nbytes for part in parts)
    )
    total = len(sizes) + sum(part.nbytes for part in parts)
    data = np.empty(total, np.uint8)
    start = 0
    for part in (memoryview(sizes), *parts):
        data[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
        start += part.nbytes
    return data


def _unpack(data: Bytes, sender: int, where: Place) -> Any:
    if _refused:
        raise DistError(
            f"{where}: rank {sender} sent a pickled object, and this rank refuses "
            "them (refuse_pickles(False) allows them)"
        )
    (count,) = struct.unpack_from("<Q", data)
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
    if sender != pg.rank:
        target[:] = _unpack(data, pg.ranks[sender], where)
