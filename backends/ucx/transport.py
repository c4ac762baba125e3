"""UCXTransport: the messages of a group over its UCX worker."""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Sequence

from ..errors import ConnectionLostError, DistError
from ..messaging.algorithms import Flat
from ..messaging.connecting import Namer
from ..messaging.signature import SHIFT
from ..messaging.sleeping import Sleeper
from ..messaging.transport import ANY_SOURCE, LONGER, TRUNCATED, Received
from ..rank_sets import name_ranks
from .library import UCXError
from .settings import chosen
from .ucp import CONSTANTS
from .worker import Request, TruncationError, Worker

__all__ = ["BITS", "UCXTransport"]

_log = logging.getLogger(__name__)

#: UCX's tags have 64 bits: from the top the sender's rank, a signature of so many, and
#: the tag. A receive leaves the signature alone: it is compared when the message is
#: there.
BITS = 28
_RANK_SHIFT = SHIFT + BITS
_TAG_MASK = (1 << SHIFT) - 1
_EXACT_MASK = (1 << 64) - (1 << _RANK_SHIFT) | _TAG_MASK
_SIGNED_MASK = (1 << _RANK_SHIFT) - 1

# What UCX says of a peer that has ended: of its memory, its sockets, or neither.
_UNREACHABLE = [
    CONSTANTS[f"UCS_ERR_{name}"]
    for name in (
        "CONNECTION_RESET",
        "ENDPOINT_TIMEOUT",
        "IO_ERROR",
        "NOT_CONNECTED",
        "SHMEM_SEGMENT",
        "UNREACHABLE",
    )
]

# UCX counts bytes with 64 bits.
_MAX_MESSAGE = 1 << 60

# While a send waits for a rank that takes nothing out of its full queue, UCX always
# has something to do. After so many turns in which nothing moved a waiter takes naps,
# which grow with the time for which nothing has come, between these seconds.
_FUTILE_TURNS = 32
_NAP, _NAP_MAX = 2e-5, 2e-2

# Seconds that close() may take to send what UCX has not sent yet.
_FLUSH_SECONDS = 0.5

# Seconds for which the transports to the other ranks are not queried again: a status
# is made ten times a second, and 63 queries take 0.7 ms. Their choice may change while
# two ranks connect.
_QUERY_SECONDS = 1.0

# Workers that could not be destroyed; nothing advances them.
_kept: list[Worker] = []


class UCXTransport:
    """Messages over one worker of UCX; see `Transport`."""

    max_message = _MAX_MESSAGE
    #: A wake-up through the descriptor costs 30 to 60 µs, and a thread that spins
    #: yields its core to another rank.
    spin = 0.001

    def __init__(self, worker: Worker, rank: int, name: Namer = name_ranks) -> None:
        self._worker, self._name = worker, name
        self._sender = rank << _RANK_SHIFT
        #: Advances everything, and returns whether a request is over; raises its error.
        self.test = worker.test
        self._futile = 0
        self._sleeper = Sleeper()
        self._sleeper.selector.register(worker.descriptor, selectors.EVENT_READ)
        self.wake = self._sleeper.wake
        self._queried: dict[int, tuple[str, ...]] = {}
        self._queried_at = 0.0

    # -- messages ------------------------------------------------------------

    def send(self, array: Flat, peer: int, tag: int) -> Request | None:
        return self._worker.send(array, peer, self._sender | tag)

    def receive(self, array: Flat, source: int, tag: int) -> Request | None:
        if source == ANY_SOURCE:
            return self._worker.receive(array, tag, _TAG_MASK)
        wanted = source << _RANK_SHIFT | tag
        try:
            request = self._worker.receive(array, wanted, _EXACT_MASK)
        except UCXError as error:
            if error.status != CONSTANTS["UCS_ERR_MESSAGE_TRUNCATED"]:
                raise
            return Request(None, True, wanted, LONGER)
        if (
            request.pointer is None
            and request.nbytes == array.nbytes
            and request.tag == wanted
        ):
            return None
        return request

    def fits(self, request: Request, nbytes: int, tag: int) -> bool:
        return request.nbytes == nbytes and request.tag & _SIGNED_MASK == tag

    def received(self, request: Request) -> Received:
        return _received(request.tag, request.nbytes)

    def unread(self, tag: int) -> None:
        """Return ``None``: the tag has no room for the whole number of a collective."""

    def too_long(self, error: BaseException) -> Received | None:
        if isinstance(error, TruncationError):
            return _received(error.tag, error.nbytes)
        return None

    def explain(self, error: BaseException) -> str | DistError | None:
        """Return the reason that UCX gives.

        A rank may be unreachable because it has aborted, or is dead. The group looks
        for that cause first.
        """
        if not isinstance(error, UCXError):
            return None
        call = error.call
        if error.peer is not None:
            call += f" to {self._name([error.peer])}"
        said = f"UCX reports: {call} failed: {error.text}{chosen()}"
        if error.status == CONSTANTS["UCS_ERR_MESSAGE_TRUNCATED"]:
            return TRUNCATED
        if error.status in _UNREACHABLE:
            return ConnectionLostError(said, reason=said)
        return said

    # -- waiting ---------------------------------------------------------------

    def arm(self) -> bool:
        worker = self._worker
        if worker.moved:
            # It may have ended a request that was looked at before.
            worker.moved, self._futile = False, 0
            return False
        if worker.arm():
            self._futile = 0
        else:
            self._futile += 1
            if self._futile <= _FUTILE_TURNS:
                return False
        return self._sleeper.arm()

    def sleep(self, timeout: float, idle: float) -> None:
        """Wait for the descriptor, or take a nap where it would never sleep."""
        if self._futile:
            # Not the events: they say all the time that there is something to do.
            longest = min(max(idle / 16, _NAP), _NAP_MAX)
            self._sleeper.sleep(min(longest, timeout), bell_alone=True)
        else:
            self._sleeper.sleep(timeout)

    def fileno(self) -> int | None:
        """Return the descriptor; ``None`` while it reports nothing: waiters nap."""
        futile = self._futile >= _FUTILE_TURNS and not self._worker.moved
        return None if futile else self._sleeper.fileno()

    # -- the end -----------------------------------------------------------------

    def transports(self) -> dict[int, tuple[str, ...]]:
        """Return the transports to each rank that was sent to: ``("sysv", "cma")``."""
        if self._sleeper.ended:  # it may end for seconds, and hold the guard
            return {}
        with self._sleeper.guard:
            return {} if self._sleeper.ended else self._worker.transports()

    def recent_transports(self) -> dict[int, tuple[str, ...]]:
        """Return `transports`, as they were up to `_QUERY_SECONDS` ago."""
        if self._sleeper.ended:
            return {}
        now = time.monotonic()
        connected = self._worker.connected
        if connected != len(self._queried) or now > self._queried_at + _QUERY_SECONDS:
            self._queried, self._queried_at = self.transports(), now
        return self._queried

    def abandon(self, requests: Sequence[tuple[Request, Flat, bool]]) -> None:
        """Destroy the worker, whose requests end with it: 2 to 20 ms.

        To cancel the receives alone would leave those that have begun to arrive.
        """
        receives = [request for request, _, is_receive in requests if is_receive]
        self._end(receives)

    def close(self) -> None:
        """Send what UCX still holds, if the peers let it, and destroy the worker."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        try:
            flushed = self._worker.flush()
            while flushed is not None and not self.test(flushed):
                os.sched_yield()
                if time.monotonic() > deadline:
                    _log.debug("UCX could not send everything before it was closed")
                    break
        except UCXError as error:
            # A peer died in the meantime, and nothing is in flight.
            _log.debug("a connection could not be flushed: %s", error)
        self._end([])

    def _end(self, receives: Sequence[Request]) -> None:
        def destroy() -> None:
            self._sleeper.selector.unregister(self._worker.descriptor)
            if self._worker.settle(receives):
                self._worker.destroy()
            else:
                _log.warning(
                    "UCX is still copying after an abort: its worker is kept, unused"
                )
                _kept.append(self._worker)

        self._sleeper.end(destroy)


def _received(tag: int, nbytes: int) -> Received:
    # UCX gives no tag of a message that it refused at once: it is the one asked for.
    signed = -1 if nbytes == LONGER else tag & _SIGNED_MASK
    return Received(tag >> _RANK_SHIFT, nbytes, signed)
