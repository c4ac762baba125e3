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

from ..devices.arrays import check_list, device_type, native
from ..groups.process_group import ProcessGroup
from ..interface.op import Op
from ..quantities import as_int
from ..rank_sets import name_ranks
from ..work.op_type import OpType
from ..work.reduce_op import PremulSum, ReduceOp
from ..work.work import Work

__all__ = [
    "Array",
    "Call",
    "Place",
    "check_op",
    "take",
    "take_device",
    "take_peer",
    "take_splits",
    "take_tag",
]

Array = Any

#: The numbers of numpy, in native byte order.
_NUMBERS = "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
_PLAIN = frozenset(map(np.dtype, _NUMBERS))


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
    """Return device type and index of a `device` argument; ``None``: no index."""
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
        flags = value.flags
        if (
            flags.c_contiguous
            and (flags.writeable or not writable)
            and value.dtype in _PLAIN
        ):
            return value, "cpu"
    where = Place(kind, pg)
    device = device_type(value, argument, where)
    return native(value, device, argument, where, writable=writable), device


class Call(Place):
    """The arrays of one call of an op, as the recorder lists them: inputs first."""

    __slots__ = ("arrays", "device", "names")

    kind: OpType

    def __init__(self, kind: OpType, pg: ProcessGroup) -> None:
        super().__init__(kind, pg)
        self.arrays: list[Array] = []
        self.names: list[str] = []
        self.device = ""

    def take(self, value: Array, argument: str, *, writable: bool = True) -> Array:
        """Validate one array; return it in native form."""
        array, device = take(value, argument, self.kind, self.pg, writable=writable)
        if self.device not in ("", device):
            raise ValueError(
                f"{self}: {argument} is on {device!r}, the other arrays are on "
                f"{self.device!r}; expected one device type"
            )
        self.device = device
        self.arrays.append(array)
        self.names.append(argument)
        return array

    def take_list(
        self, values: Sequence[Array], argument: str, *, writable: bool = True
    ) -> list[Array]:
        """Validate a list with one array per rank."""
        check_list(values, argument, self.pg.size(), self)
        return [
            self.take(value, f"{argument}[{i}]", writable=writable)
            for i, value in enumerate(values)
        ]

    def take_root_list(
        self,
        values: Sequence[Array] | None,
        argument: str,
        root: int,
        *,
        writable: bool = True,
    ) -> list[Array] | None:
        """Validate a list that only the root gives."""
        pg = self.pg
        if pg.rank() != root:
            if values:
                raise ValueError(
                    f"{self}: {argument} is given, but this rank is not the root "
                    f"(rank {pg.ranks[root]}); expected None"
                )
            return None
        if values is None:
            raise ValueError(
                f"{self}: {argument} is missing; expected a list of {pg.size()} "
                f"arrays on the root (rank {pg.ranks[root]})"
            )
        return self.take_list(values, argument, writable=writable)

    def check_dtypes(self) -> None:
        """Raise `TypeError` unless all arrays have the dtype of the first."""
        first, *others = self.arrays
        for i, array in enumerate(others, 1):
            if array.dtype != first.dtype:
                raise TypeError(
                    f"{self}: {self.names[i]} has dtype {array.dtype}, {self.names[0]} "
                    f"has {first.dtype}; expected one dtype"
                )

    def check_size(self, array: Array, argument: str, expected: int, why: str) -> None:
        """Raise `ValueError` unless `array` has `expected` elements; `why` explains."""
        if array.size != expected:
            raise ValueError(
                f"{self}: {argument} (shape {tuple(array.shape)}) has {array.size} "
                f"elements; expected {expected}: {why}"
            )

    def check_sizes(self, arrays: Sequence[Array], argument: str, size: int) -> None:
        """Do `check_size` for each of a list, which has to be as large as `tensor`."""
        for i, array in enumerate(arrays):
            self.check_size(array, f"{argument}[{i}]", size, "the size of tensor")

    def check_own_part(self, received: int, sent: int) -> None:
        """Raise `ValueError` unless this rank receives what it sends itself."""
        if received != sent:
            raise ValueError(
                f"{self}: part {self.pg.rank()}, what this rank sends itself, has size "
                f"{sent} in the input and {received} in the output; expected one size"
            )

    def issue(self, args: tuple[Any, ...], **facts: Any) -> Work:
        """Issue the op: `args` are those of the backend's method, `facts` of `Op`."""
        return self.pg.issue(Op(self.kind, self.device, self.arrays, args, **facts))


def take_splits(
    array: Array, sizes: Sequence[int] | None, argument: str, where: Place
) -> list[int]:
    """Return the rows of dimension 0 of `array` for each rank; evenly by default."""
    ranks = where.pg.size()
    if not array.shape:
        raise ValueError(f"{where}: {argument} has no dimension 0 to split")
    rows = array.shape[0]
    try:
        counts = [] if sizes is None else [index(size) for size in sizes]
    except TypeError as error:
        raise TypeError(
            f"{where}: {argument}_split_sizes={sizes!r}; expected {ranks} integers"
        ) from error
    if not counts:
        if rows % ranks:
            raise ValueError(
                f"{where}: dimension 0 of {argument} (shape {tuple(array.shape)}) is "
                f"not divisible by {ranks} ranks; give {argument}_split_sizes"
            )
        return [rows // ranks] * ranks
    if len(counts) != ranks or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{where}: {argument}_split_sizes={counts}; expected {ranks} "
            f"sizes of at least 0 that add up to {rows}, dimension 0 of {argument}"
        )
    return counts
