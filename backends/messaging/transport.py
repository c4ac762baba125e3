"""Transport: what carries the tagged messages of one group."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import DistError
from .algorithms import Flat

__all__ = [
    "ANY_SOURCE",
    "LONGER",
    "TRUNCATED",
    "Connector",
    "Received",
    "Request",
    "Transport",
    "address_of",
]

#: As the source of a receive: from any rank of the group.
ANY_SOURCE = -1

#: The reason where a message was longer than the array that was to receive it.
TRUNCATED = (
    "a rank sent more than was expected: the arrays' sizes or dtypes differ between "
    "ranks"
)

#: What a transport returns for a message in flight; the queue only passes it on.
Request = Any

#: As the bytes of a message: more than there is room for, by how many is not known.
LONGER = -1


class Received(NamedTuple):
    """What is known of a message that has come."""

    source: int
    nbytes: int
    #: With the signature; negative where that is not known.
    tag: int = -1


class Transport(Protocol):
    """The connections of this rank to the others of one group.

    Messages from one rank to another with the same tag arrive in the order in
    which they were sent. Above the tag there may be a signature (`Signer`), which is
    carried and does not have to match. Peers are ranks in the group. The queue keeps
    an array until its request is over, and makes every call under its lock, but
    `sleep`, `wake` and `fileno`, which any thread may make at any time.
    """

    #: Bytes of the largest message; the queue cuts larger arrays.
    max_message: int
    #: Seconds that a waiter spins, yielding the core, before it sleeps.
    spin: float

    def send(self, array: Flat, peer: int, tag: int) -> Request | None:
        """Start to send `array`; ``None``: it was sent, and may change again."""

    def receive(self, array: Flat, source: int, tag: int) -> Request | None:
        """Start to receive into `array` from `source`, which may be `ANY_SOURCE`.

        A message may be shorter than `array` (`received` tells); one that is longer
        ends as an error. ``None``: the message of `source`, not `ANY_SOURCE`, was
        there, and fills `array`.
        """

    def test(self, request: Request, looks: int = 1) -> bool:
        """Advance what is in flight; return whether `request` is over; raise its error.

        Advances and looks up to `looks` times: a message may come within microseconds,
        and calls from outside cost as much. An interrupt may lose the answer: a request
        that is over may be tested again.
        """

    def fits(self, request: Request, nbytes: int, tag: int) -> bool:
        """Return whether the receive that was tested last has received what it should.

        That is `nbytes` bytes, with the signature of `tag` where the transport looks at
        it. Called right after `test` returned ``True``; if that was not the first time,
        nothing is known, and the answer is ``True``.
        """

    def received(self, request: Request) -> Received:
        """Return what the receive that was tested last has received.

        Called after `fits`. The source is negative where nothing is known.
        """

    def unread(self, tag: int) -> Received | None:
        """Return a message of a collective that no receive has taken, nor will.

        All receives of the collective with `tag`, and of those before, are over: the
        ranks did not call them alike. Each may have been the sender of its own.
        ``None`` where the transport does not look at what nobody has asked for.
        """

    def too_long(self, error: BaseException) -> Received | None:
        """Return what was received, if `error` is that it is longer than the array.

        ``None`` also where the library does not tell; see `explain` then.
        """

    def explain(self, error: BaseException) -> str | DistError | None:
        """Return the reason, for all ranks, of an error that a call raised.

        A `DistError` may name dead ranks as its culprits. ``None``: the error is not
        of the library.
        """

    def abandon(self, requests: Sequence[tuple[Request, Flat, bool]]) -> None:
        """Abandon the requests in flight: request, array, whether it is a receive.

        The last call of a group that was aborted; bounded, as it may run in a signal
        handler. Afterwards nothing is written to an array whose receive has not begun
        to arrive, and the transport keeps the memory that is still in use.
        """

    def arm(self) -> bool:
        """Prepare `sleep`; return ``False`` if there is something to do first."""

    def sleep(self, timeout: float, idle: float) -> None:
        """Wait until a message or `wake` may have come, for `timeout` seconds at most.

        `arm` was called before: what came since then ends it. It may return early: a
        transport that is told of nothing takes naps, which grow with the seconds for
        which nothing has come (`idle`).
        """

    def wake(self) -> None:
        """End the sleep of other threads, or the next one if they have only armed."""

    def fileno(self) -> int | None:
        """Return the descriptor that is readable once there is something to do.

        It holds after `arm`. ``None``: there is none, and waiters take naps.
        """

    def close(self) -> None:
        """Free the connections: nothing is in flight."""


class Connector(Protocol):
    """Makes the transport of a group once all its members are there."""

    def connect(self) -> Transport | None:
        """Return the transport, or ``None`` after `cancel`; blocks, on its own thread.

        Raises `DistError` if the members cannot be connected.
        """

    def cancel(self) -> None:
        """End `connect` from another thread; returns at once."""


_pointer_at = ctypes.c_void_p.from_address

# Where PyArrayObject, whose layout is part of numpy's stable ABI, has its address.
_DATA = object.__basicsize__


def address_of(array: Any) -> ctypes.c_void_p:
    """Return where the elements of `array` are: its ``ctypes.data`` takes 1 µs."""
    return _pointer_at(id(array) + _DATA)


def _slow_address(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


_probe = np.zeros(3, np.int16)[1:]
# Another Python than CPython's usual one.
if address_of(_probe).value != _slow_address(_probe).value:
    address_of = _slow_address
