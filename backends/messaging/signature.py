"""Signature: what all ranks must call alike, in a number that each message carries.

Ranks that call a collective with different dtypes, reductions or roots, or of which
one has left a call out, could exchange messages that fit by accident, and would
compute nonsense. The receiver compares the signature of each message with its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import DistBackendError
from ..work.op_type import OpType
from .algorithms import Ufunc
from .transport import LONGER, Received

__all__ = [
    "BITS",
    "FIRST",
    "KINDS",
    "SHIFT",
    "Difference",
    "Members",
    "Signer",
    "differences",
    "is_over",
    "mismatch",
    "unread",
]

#: A signature has so many bits, above those of a message's tag. A transport that has no
#: room for all carries the lower ones.
BITS, SHIFT = 44, 16
#: A message of a collective has the tag `FIRST` and the place of its kind here.
KINDS = tuple(OpType)
FIRST = 32000

# Its fields, from the lowest bit on: dtype, reduction, root, number of the call. Half
# of all numbers are more than a rank is ever ahead of another.
_DTYPE, _REDUCTION, _ROOT, _NUMBER = 6, 4, 6, 28
# Half of the numbers that every transport can carry.
_HALF = 1 << 11

# A dtype or a reduction that is not listed has the number 0.
_DTYPES = (
    "another dtype",
    *("bool", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "longdouble", "bfloat16"),
    *("complex64", "complex128", "clongdouble"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
_UFUNCS: dict[Any, tuple[int, str]] = {
    np.add: (1, "SUM"),
    np.multiply: (2, "PRODUCT"),
    np.minimum: (3, "MIN"),
    np.maximum: (4, "MAX"),
    np.bitwise_and: (5, "BAND"),
    np.bitwise_or: (6, "BOR"),
    np.bitwise_xor: (7, "BXOR"),
}
#: Why ranks meet in different calls: one that has another root waits for nobody.
_ORDERS = "the ranks call them in different orders, or one with different roots"
_REDUCTIONS = dict(_UFUNCS.values())


class Difference(NamedTuple):
    """What ranks have not called alike, and its value on either side.

    A root is a place in the group, if that has no more than 64 ranks. Of the number of
    calls `theirs` is how many more the other rank has made. An op is its name.
    """

    what: str
    theirs: int | str
    ours: int | str


class Signer:
    """Counts the collectives of one group on this rank, and signs them."""

    def __init__(self, bits: int = BITS) -> None:
        self._number, self._mask = 0, (1 << bits - BITS + _NUMBER) - 1
        # By dtype and ufunc: a dtype's name takes microseconds to find.
        self._known: dict[tuple[Any, Ufunc | None], int] = {}

    def sign(self, dtype: Any, ufunc: Ufunc | None = None, root: int = 0) -> int:
        """Return the signature of the next collective, in its place above the tag."""
        self._number = number = self._number + 1 & self._mask
        known = self._known.get((dtype, ufunc))
        if known is None:
            known = self._known[dtype, ufunc] = _code(dtype, ufunc)
        root &= (1 << _ROOT) - 1
        return (known | root << _DTYPE + _REDUCTION | number << BITS - _NUMBER) << SHIFT


def _code(dtype: Any, ufunc: Ufunc | None) -> int:
    name = "" if dtype is None else dtype.name
    # numpy names its longest floats by their bits.
    if dtype is not None and dtype.char in "gG":
        name = "longdouble" if dtype.char == "g" else "clongdouble"
    reduction, _ = _UFUNCS.get(ufunc, (0, ""))
    return (_DTYPES.index(name) if name in _DTYPES else 0) | reduction << _DTYPE


def _fields(tag: int) -> tuple[int, int, int, int]:
    rest, found = tag >> SHIFT, []
    for bits in (_DTYPE, _REDUCTION, _ROOT, _NUMBER):
        found.append(rest & (1 << bits) - 1)
        rest >>= bits
    dtype, reduction, root, number = found
    return dtype, reduction, root, number


def differences(theirs: int, ours: int) -> Difference | None:
    """Return the first thing that differs between the tags of two ranks."""
    their_dtype, their_reduction, their_root, their_number = _fields(theirs)
    dtype, reduction, root, number = _fields(ours)
    # Those of sends and receives are of no kind.
    if (theirs ^ ours) & (1 << SHIFT) - 1:
        return Difference("op", _kind(theirs).value, _kind(ours).value)
    # Ranks that are in different calls need not call them alike.
    if their_number != number:
        return Difference("calls", _more(their_number, number), 0)
    if their_dtype != dtype:
        return Difference("dtype", _DTYPES[their_dtype], _DTYPES[dtype])
    if their_reduction != reduction:
        names = [_REDUCTIONS.get(one, "none") for one in (their_reduction, reduction)]
        return Difference("reduce op", *names)
    return None if their_root == root else Difference("root", their_root, root)


def _more(their_number: int, number: int) -> int:
    more = (their_number - number + _HALF & 2 * _HALF - 1) - _HALF
    return more or their_number - number


def is_over(theirs: int, ours: int) -> bool:
    """Return whether a rank that has ended the collective `ours` has ended `theirs`."""
    shift = SHIFT + BITS - _NUMBER
    behind = (ours >> shift) - (theirs >> shift) & (1 << _NUMBER) - 1
    return behind < 1 << _NUMBER - 1


class Members(NamedTuple):
    """The global ranks of a group, by rank in it, and that of this process."""

    rank: int
    ranks: Sequence[int]


def mismatch(
    op_type: OpType,
    members: Members,
    tag: int,
    received: Received,
    expected: int,
    over: Iterable[int] = (),
) -> DistBackendError:
    """Return the error of an op to which a message came that does not fit."""
    op, sender = op_type.value, f"rank {members.ranks[received.source]}"
    signed = received.tag >= 0
    found = differences(received.tag, tag) if signed else None
    if found is not None:
        earlier = _numbered(received.tag, over)
        if earlier is not None:
            return _of_earlier(members, tag, earlier, received)
    if found is None:
        sent = f"{received.nbytes} bytes where {expected}"
        if received.nbytes == LONGER:
            sent = f"more than the {expected} bytes that"
        what = "sizes" if signed else "sizes or dtypes"
        if signed and len(members.ranks) > 1 << _ROOT:
            what = "sizes or roots"
        return DistBackendError(
            f"{op}: {sender} sent {sent} were expected: the arrays' {what} differ "
            "between ranks"
        )
    more = _more(_fields(received.tag)[-1], _fields(tag)[-1])
    if found.what == "op" and more:
        # What the other rank has called in the place of `op` is not known.
        when = "later" if more > 0 else "earlier"
        return DistBackendError(
            f"{op}: {sender} is in {found.theirs}, {_collectives(more)} {when}: "
            f"{_ORDERS}"
        )
    return DistBackendError(f"{op}: {_sentence(found, sender, members)}")


def _of_earlier(
    members: Members, tag: int, earlier: int, received: Received
) -> DistBackendError:
    """Return the error of a message that the collective `earlier` has not received."""
    said = mismatch(_kind(earlier), members, earlier, received, 0)
    count = -_more(_fields(earlier)[-1], _fields(tag)[-1])
    when = "the collective" if count == 1 else f"{count} collectives"
    return DistBackendError(f"{when} before: {said}; its values may be wrong")


def unread(
    members: Members, tag: int, received: Received, over: Iterable[int]
) -> DistBackendError:
    """Return the error of a message that nobody can receive any more."""
    if _numbered(received.tag, (tag, *over)) is not None:
        return mismatch(_kind(tag), members, tag, received, 0, over)
    kind, sender = _kind(received.tag).value, members.ranks[received.source]
    return DistBackendError(
        f"rank {sender} sent {received.nbytes} bytes in an earlier {kind}, for which "
        f"rank {members.rank} had no use: the ranks called it with different roots or "
        "sizes, or call collectives in different orders; its values may be wrong"
    )


def _kind(tag: int) -> OpType:
    return KINDS[(tag & (1 << SHIFT) - 1) - FIRST]


def _numbered(tag: int, tags: Iterable[int]) -> int | None:
    """Return which of `tags` has the number of `tag`."""
    number = _fields(tag)[-1]
    return next((one for one in tags if _fields(one)[-1] == number), None)


def _collectives(count: int) -> str:
    return f"{abs(count)} collective{'' if abs(count) == 1 else 's'}"


def _sentence(found: Difference, sender: str, members: Members) -> str:
    what, theirs, ours = found
    receiver = f"rank {members.rank}"
    if what == "op":
        return (
            f"{sender} has called {theirs} in its place: the ranks call collectives in "
            "different orders"
        )
    if what == "calls":
        more = int(theirs) - int(ours)
        than = f"{'more' if more > 0 else 'less'} than {receiver}"
        return f"{sender} has called {_collectives(more)} {than}: {_ORDERS}"
    if what == "root":
        theirs, ours = (members.ranks[int(root)] for root in (theirs, ours))
    # Both ranks tell, in one order: what tells of both then has it once.
    sides = sorted([(sender, theirs), (receiver, ours)], key=lambda one: one[0])
    return f"{what} {', '.join(f'{value} on {rank}' for rank, value in sides)}"
