"""The error of a message that does not fit: it names both ranks and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import DistBackendError
from ..work.op_type import OpType
from .signature import Difference, differences
from .transport import LONGER, Received

__all__ = ["Members", "mismatch"]


class Members(NamedTuple):
    """The global ranks of a group, by rank in it, and that of this process."""

    rank: int
    ranks: Sequence[int]


def mismatch(
    op_type: OpType,
    members: Members | None,
    tag: int,
    received: Received,
    expected: int,
) -> DistBackendError:
    """Return the error of an op to which a message came that does not fit.

    Parameters
    ----------
    op_type, tag
        Of the op.
    members
        By which ranks are named; ``None``: by their place in the group.
    received
        The message.
    expected
        The bytes that it should have had.
    """
    op, source = op_type.value, received.source
    sender = _name(members, source)
    receiver = "this rank" if members is None else f"rank {members.rank}"
    signed = received.tag >= 0
    found = differences(received.tag, tag) if signed else None
    if found is None:
        sent = f"{received.nbytes} bytes where {expected}"
        if received.nbytes == LONGER:
            sent = f"more than the {expected} bytes that"
        what = "sizes" if signed else "sizes or dtypes"
        return DistBackendError(
            f"{op}: {sender} sent {sent} were expected: the arrays' {what} differ "
            "between ranks"
        )
    return DistBackendError(_sentence(op, sender, receiver, found, members))


def _name(members: Members | None, place: int) -> str:
    return (
        f"rank {place} of the group"
        if members is None
        else f"rank {members.ranks[place]}"
    )


def _sentence(
    op: str,
    sender: str,
    receiver: str,
    found: Difference,
    members: Members | None,
) -> str:
    what, theirs, ours = found
    if what == "op":
        return (
            f"{op}: {sender} has called {theirs} in its place: the ranks call "
            "collectives in different orders"
        )
    if what == "calls":
        more = int(theirs) - int(ours)
        calls = f"{abs(more)} collective{'' if abs(more) == 1 else 's'}"
        return (
            f"{op}: {sender} has called {calls} {'more' if more > 0 else 'less'} than "
            f"{receiver}: the ranks call them in different orders"
        )
    if what == "root" and members is not None:
        theirs, ours = (members.ranks[int(root)] for root in (theirs, ours))
    return f"{op}: {what} {theirs} on {sender}, {ours} on {receiver}"
