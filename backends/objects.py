"""Object collectives: any picklable Python object, over the array collectives.

Objects are pickled with protocol 5, large buffers (arrays and their like) out
of band, so that they are not copied into the pickle. Unpickling runs code of
the sender's choosing: a rank may refuse it with :func:`refuse_pickles`, and
then every object that reaches it raises, after the op is over on all ranks.

The bytes travel through host memory where the group has a backend for it, else
through arrays on its first device type. `device`, where there is one, picks
another device type of the group, the same on all ranks: ``'cpu'``, ``'cuda'``,
``'cuda:1'``, a ``torch.device``. One that the group has no backend for raises
`ValueError`. Without an index it is the device that the group was used on first,
else the current one. Every error names the call that was made.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from .arguments import Place, check_tag, take_peer
from .arrays import check_list
from .carrier import Carrier
from .errors import DistError
from .groups import Group, resolve_group
from .process_group import ProcessGroup
from .work import OpType

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "refuse_pickles",
    "scatter_object_list",
    "send_object_list",
]

# Flat arrays of bytes. Not spelled more precisely: numpy's stubs differ on it.
Bytes = Any

_refused = False


def refuse_pickles(refuse: bool = True) -> None:
    """Refuse to unpickle what other ranks send to this one, or allow it again."""
    global _refused
    _refused = refuse


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """``object_list[r]`` becomes `obj` of rank r; the list has world-size entries."""
    pg = resolve_group(group, "all_gather_object")
    where = Place("all_gather_object", pg)
    check_list(object_list, "object_list", pg.size(), where)
    mine = _pack(obj, "obj", where)
    carrier = Carrier(where, OpType.ALL_GATHER)
    sizes = _sizes(mine, carrier, pg)
    parts = [np.empty(size, np.uint8) for size in sizes]
    carrier.all_gather(parts, mine)
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
    """The entries of `object_list` become those of rank `src` (default 0).

    The list has one length on all ranks. `device`: see this module.
    """
    pg = resolve_group(group, "broadcast_object_list")
    where = Place("broadcast_object_list", pg)
    root = take_peer(pg, src, group_src, "src", "broadcast_object_list", default=0)
    _check_objects(object_list, "object_list", where)
    carrier = Carrier(where, OpType.BROADCAST, device)
    data = np.empty(0, np.uint8)
    header = np.zeros(2, np.int64)
    if pg.rank == root:
        data = _pack(object_list, "object_list", where)
        header[:] = len(object_list), data.size
    carrier.broadcast(header, root)
    count, size = header.tolist()
    if pg.rank != root:
        data = np.empty(size, np.uint8)
    carrier.broadcast(data, root)
    _fill(object_list, data, count, root, pg, where)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """On rank `dst` (default 0), ``object_gather_list[r]`` becomes `obj` of rank r."""
    pg = resolve_group(group, "gather_object")
    where = Place("gather_object", pg)
    root = take_peer(pg, dst, group_dst, "dst", "gather_object", default=0)
    if pg.rank == root:
        check_list(object_gather_list, "object_gather_list", pg.size(), where)
    mine = _pack(obj, "obj", where)
    carrier = Carrier(where, OpType.GATHER)
    sizes = _sizes(mine, carrier, pg)
    # gather takes one size; what is short is padded, and cut again.
    widest = int(sizes.max())
    padded = np.zeros(widest, np.uint8)
    padded[: mine.size] = mine
    rows = None
    if pg.rank == root:
        rows = list(np.empty((pg.size(), widest), np.uint8))
    carrier.gather(padded, rows, root)
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
    """The first entry of the output list becomes entry `rank` of rank `src`'s input.

    `scatter_object_input_list` has world-size entries, on `src` alone
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
    carrier = Carrier(where, OpType.SCATTER)
    carrier.broadcast(sizes, root)
    widest = int(sizes.max())
    rows = None
    if pg.rank == root:
        table = np.zeros((pg.size(), widest), np.uint8)
        for row, part in zip(table, parts, strict=True):
            row[: part.size] = part
        rows = list(table)
    mine = np.empty(widest, np.uint8)
    carrier.scatter(mine, rows, root)
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
    carrier = Carrier(where, OpType.SEND, device)
    carrier.send(header, peer, tag)
    carrier.send(data, peer, tag)


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
    carrier = Carrier(where, OpType.RECV, device)
    header = np.empty(2, np.int64)
    sender = carrier.recv(header, peer, tag)
    count, size = header.tolist()
    data = np.empty(size, np.uint8)
    carrier.recv(data, sender, tag)
    _fill(object_list, data, count, sender, pg, where)
    return pg.ranks[sender]


# -- pickles -----------------------------------------------------------------


def _sizes(mine: Bytes, carrier: Carrier, pg: ProcessGroup) -> Any:
    """The size of every rank's `mine`."""
    sizes = np.empty(pg.size(), np.int64)
    carrier.all_gather(list(sizes.reshape(-1, 1)), np.array([mine.size], np.int64))
    return sizes


def _check_objects(value: Any, argument: str, where: Place) -> None:
    if not isinstance(value, (list, tuple)) or not value:
        raise TypeError(
            f"{where}: {argument} is {value!r}; expected a list of at least one entry"
        )


def _pack(obj: Any, argument: str, where: Place) -> Bytes:
    """Pickle `obj`: the number and sizes of the parts, the pickle, its buffers."""
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
    # Each buffer in memory of its own: aligned, and not kept alive by its siblings.
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
