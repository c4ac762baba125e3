"""Arguments of the collectives: the checks they share, before any byte moves.

Every `take_*` validates and returns what the dispatcher needs; every `check_*`
raises `TypeError` or `ValueError` that names the op, the group, the rank, the
argument and what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from ..devices.arrays import check_dtypes, check_list, check_size, device_type, native
from ..groups.process_group import ProcessGroup
from ..quantities import as_int
from ..rank_sets import name_ranks
from ..work.op_type import OpType
from ..work.reduce_op import PremulSum, ReduceOp

__all__ = [
    "Array",
    "Place",
    "check_equal_sizes",
    "check_op",
    "check_own_part",
    "check_same",
    "take",
    "take_device",
    "take_list",
    "take_on",
    "take_peer",
    "take_root_list",
    "take_splits",
    "take_tag",
]

Array = Any


class Place:
    """The op and the group of a call: the first words of its error messages.

    `kind` is the name of the public function if that is no op of its own. The text is
    made by `str`, which only an error calls.
    """

    __slots__ = ("kind", "pg")

    def __init__(self, kind: OpType | str, pg: ProcessGroup) -> None:
        self.kind = kind
        self.pg = pg

    @property
    def name(self) -> str:
        return self.kind if isinstance(self.kind, str) else self.kind.value

    def __str__(self) -> str:
        return f"{self.name} in {self.pg.describe()}"


def check_op(op: ReduceOp, name: str, pg: ProcessGroup) -> None:
    """Raise `TypeError` unless `op` is a reduction."""
    if not isinstance(op, (ReduceOp, PremulSum)):
        names = ", ".join(member.name for member in ReduceOp)
        raise TypeError(
            f"{name} in {pg.describe()}: op is {op!r}; expected a ReduceOp ({names})"
        )


def take_tag(tag: int, name: str, pg: ProcessGroup) -> int:
    """Return `tag` as an int; `ValueError` unless it is from 0 to 2**31 - 1."""
    if type(tag) is not int:
        tag = as_int(tag, f"{name} in {pg.describe()}: tag")
    if not 0 <= tag < 2**31:
        raise ValueError(
            f"{name} in {pg.describe()}: tag={tag!r}; expected an int from 0 to "
            f"{2**31 - 1}"
        )
    return tag


def take_device(device: Any, where: Place) -> tuple[str, int | None]:
    """Return device type and index of a `device` argument; ``None``: no index.

    It is a type such as ``'cuda'``, with an index ``'cuda:0'``, or what has a
    `type` and perhaps an `index`, as ``torch.device`` does. `ValueError` otherwise.
    """
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        if kind.isidentifier() and (not colon or number.isdecimal()):
            return kind, int(number) if colon else None
    elif isinstance(getattr(device, "type", None), str):
        return device.type, getattr(device, "index", None)
    raise ValueError(
        f"{where}: device={device!r}; expected a device type such as 'cpu' or 'cuda', "
        "or 'cuda:0'"
    )


def take_peer(
    pg: ProcessGroup,
    global_rank: int | None,
    group_rank: int | None,
    argument: str,
    name: str,
    *,
    default: int | None = None,
    itself: bool = True,
) -> int:
    """Return the rank in the group that `argument` means, or raise `ValueError`."""
    where = f"{name} in {pg.describe()}"
    if global_rank is not None and group_rank is not None:
        raise ValueError(f"{where}: give {argument} or group_{argument}, not both")
    if global_rank is None and group_rank is None:
        if default is None:
            raise ValueError(f"{where}: {argument} is missing; expected a global rank")
        # torch's default is global rank 0; a group without it has its own.
        return pg.ranks.index(default) if default in pg.ranks else 0
    if group_rank is not None:
        if type(group_rank) is not int:
            group_rank = as_int(group_rank, f"{where}: group_{argument}")
        if not 0 <= group_rank < pg.size():
            raise ValueError(
                f"{where}: group_{argument}={group_rank!r}; expected a rank in the "
                f"group, 0 to {pg.size() - 1}"
            )
        peer = group_rank
    else:
        if type(global_rank) is not int:
            global_rank = as_int(global_rank, f"{where}: {argument}")
        if global_rank not in pg.ranks:
            raise ValueError(
                f"{where}: {argument}={global_rank!r}; expected a rank in the group, "
                f"which has {name_ranks(pg.ranks)}"
            )
        peer = pg.ranks.index(global_rank)
    if peer == pg.rank() and not itself:
        raise ValueError(
            f"{where}: {argument} is this rank itself; expected another rank"
        )
    return peer


def take(
    value: Array,
    argument: str,
    kind: OpType,
    pg: ProcessGroup,
    *,
    writable: bool = True,
) -> tuple[Array, str]:
    """Validate one array; return it in native form with its device type."""
    if type(value) is np.ndarray:
        # The usual case: the checks of `native`, without a further call.
        flags, dtype = value.flags, value.dtype
        if (
            flags.c_contiguous
            and (flags.writeable or not writable)
            and dtype.kind in "biufc"
            and dtype.isnative
        ):
            return value, "cpu"
    where = Place(kind, pg)
    device = device_type(value, argument, where)
    return native(value, device, argument, where, writable=writable), device


def take_on(
    value: Array,
    argument: str,
    kind: OpType,
    pg: ProcessGroup,
    device: str,
    *,
    writable: bool = True,
) -> Array:
    """Validate one array that has to be on `device`."""
    array, found = take(value, argument, kind, pg, writable=writable)
    if found != device:
        raise ValueError(
            f"{Place(kind, pg)}: {argument} is on {found!r}, the other arrays are "
            f"on {device!r}; expected one device type"
        )
    return array


def take_list(
    values: Sequence[Array],
    argument: str,
    kind: OpType,
    pg: ProcessGroup,
    device: str,
    *,
    writable: bool = True,
) -> list[Array]:
    """Validate a list with one array per rank, all on `device`."""
    check_list(values, argument, pg.size(), Place(kind, pg))
    return [
        take_on(value, f"{argument}[{i}]", kind, pg, device, writable=writable)
        for i, value in enumerate(values)
    ]


def take_root_list(
    values: Sequence[Array] | None,
    argument: str,
    kind: OpType,
    pg: ProcessGroup,
    device: str,
    root: int,
    *,
    writable: bool = True,
) -> list[Array] | None:
    """Validate a list that only the root gives."""
    if pg.rank() != root:
        if values:
            raise ValueError(
                f"{Place(kind, pg)}: {argument} is given, but this rank is not the "
                f"root (rank {pg.ranks[root]}); expected None"
            )
        return None
    if values is None:
        raise ValueError(
            f"{Place(kind, pg)}: {argument} is missing; expected a list of "
            f"{pg.size()} arrays on the root (rank {pg.ranks[root]})"
        )
    return take_list(values, argument, kind, pg, device, writable=writable)


def check_same(arrays: Sequence[Array], first: str, rest: str, where: Place) -> None:
    """Raise `TypeError` unless all `arrays` have one dtype; `rest` names a list."""
    check_dtypes(
        arrays, [first, *(f"{rest}[{i}]" for i in range(len(arrays) - 1))], where
    )


def check_equal_sizes(
    arrays: Sequence[Array], argument: str, size: int, other: str, where: Place
) -> None:
    """Raise `ValueError` unless each of `arrays` has `size` elements, as `other`."""
    for i, array in enumerate(arrays):
        check_size(array, f"{argument}[{i}]", size, f"the size of {other}", where)


def check_own_part(received: int, sent: int, pg: ProcessGroup, where: Place) -> None:
    """Raise `ValueError` unless a rank receives from itself what it sends itself."""
    if received != sent:
        raise ValueError(
            f"{where}: part {pg.rank()}, what this rank sends itself, has size {sent} "
            f"in the input and {received} in the output; expected one size"
        )


def take_splits(
    array: Array,
    sizes: Sequence[int] | None,
    argument: str,
    pg: ProcessGroup,
    where: Place,
) -> list[int]:
    """Return the rows of dimension 0 of `array` for each rank; evenly by default."""
    if not array.shape:
        raise ValueError(f"{where}: {argument} has no dimension 0 to split")
    rows = array.shape[0]
    try:
        counts = [] if sizes is None else [index(size) for size in sizes]
    except TypeError as error:
        raise TypeError(
            f"{where}: {argument}_split_sizes={sizes!r}; expected {pg.size()} integers"
        ) from error
    if not counts:
        if rows % pg.size():
            raise ValueError(
                f"{where}: dimension 0 of {argument} (shape {tuple(array.shape)}) is "
                f"not divisible by {pg.size()} ranks; give {argument}_split_sizes"
            )
        return [rows // pg.size()] * pg.size()
    if len(counts) != pg.size() or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{where}: {argument}_split_sizes={counts}; expected {pg.size()} "
            f"sizes of at least 0 that add up to {rows}, dimension 0 of {argument}"
        )
    return counts
