"""UCCTransport: the collectives and messages of a group over its UCC context."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from ctypes import byref, c_int, c_void_p
from typing import Any, NamedTuple

import numpy as np

from ..messaging.algorithms import Flat
from ..messaging.transport import Napping, Received
from . import abandoned, ucc
from .context import Context
from .library import UCCError

__all__ = ["Collective", "Request", "UCCTransport"]

_log = logging.getLogger(__name__)

# Seconds that close() waits for UCC, which may wait for a peer.
_CLOSE_SECONDS = 2.0

_BYTE = ucc.CONSTANTS["UCC_DT_UINT8"]
_BROADCAST = ucc.CONSTANTS["UCC_COLL_TYPE_BCAST"]
_TO_ONE = (
    ucc.CONSTANTS["UCC_COLL_ARGS_FIELD_TAG"]
    | ucc.CONSTANTS["UCC_COLL_ARGS_FIELD_ACTIVE_SET"]
)


class Collective(NamedTuple):
    """A collective of UCC to start, and the memory that it reads and writes.

    `writes`: it writes to arrays of the caller.
    """

    arguments: ucc.Arguments
    memory: Sequence[Any]
    writes: bool = True


class Request:
    """A collective in flight, or the two of a message: its length, and its bytes."""

    __slots__ = ("header", "memory", "parts", "source", "status", "writes")

    def __init__(
        self,
        memory: Sequence[Any],
        writes: bool,
        source: int = -1,
        header: Flat | None = None,
    ) -> None:
        self.memory, self.writes = memory, writes
        self.source, self.header = source, header
        #: The first error of those that are over.
        self.status = 0
        #: The handle of each collective that is not over, and its status.
        self.parts: list[tuple[c_void_p, c_int]] = []


class UCCTransport(Napping):
    """Collectives over one context of UCC, and messages as broadcasts to one rank.

    It is a `Transport`. UCC reports no arrival, so that waiters take naps.
    """

    max_message = 1 << 60

    def __init__(self, context: Context, rank: int) -> None:
        self._context, self._rank = context, rank
        self._library = context.library
        self._in_flight: set[Request] = set()

    # -- to start and to test ------------------------------------------------

    def start(self, collective: Collective) -> Request:
        """Start a collective."""
        request = Request(collective.memory, collective.writes)
        self._post(request, collective.arguments)
        return request

    def _post(self, request: Request, arguments: ucc.Arguments) -> None:
        library, handle = self._library, c_void_p()
        status = library.ucc_collective_init(
            byref(arguments), byref(handle), self._context.team
        )
        if status < 0:
            library.check("ucc_collective_init", status)
        # ucc_coll_req_t begins with the status, which a macro of the header reads.
        assert handle.value is not None
        request.parts.append((handle, c_int.from_address(handle.value)))
        self._in_flight.add(request)
        status = library.ucc_collective_post(handle)
        if status < 0:
            library.check("ucc_collective_post", status)

    def test(self, request: Request, looks: int = 1) -> bool:
        """Advance everything; return whether `request` is over; raise its error."""
        parts, context = request.parts, self._context
        for look in range(looks + 1):
            while parts and parts[-1][1].value <= 0:
                handle, status = parts[-1]
                request.status = request.status or status.value
                # An interrupt after this loses the handle; it would be freed twice.
                parts.pop()
                self._library.ucc_collective_finalize(handle)
            if not parts:
                self._in_flight.discard(request)
                if request.status < 0:
                    self._library.check("a collective of UCC", request.status)
                return True
            if look < looks:
                context.progress()
        return False

    # -- messages ------------------------------------------------------------

    def send(self, array: Flat, peer: int, tag: int) -> Request:
        """Start to send the length of `array`, and `array`."""
        return self._message(array, self._rank, peer, tag)

    def receive(self, array: Flat, source: int, tag: int) -> Request:
        """Start to receive into `array`."""
        return self._message(array, source, self._rank, tag)

    def _message(self, array: Flat, source: int, target: int, tag: int) -> Request:
        header = np.array([array.nbytes], np.uint64)
        request = Request((array, header), target == self._rank, source, header)
        # All of both at once: the messages of two ranks with one tag stay in order.
        for part in (header, array):
            if not part.nbytes:
                continue
            arguments = ucc.Arguments(
                mask=_TO_ONE, coll_type=_BROADCAST, root=source, tag=tag
            )
            info = arguments.src.info
            info.buffer, info.count, info.datatype = (
                part.ctypes.data,
                part.nbytes,
                _BYTE,
            )
            members = arguments.active_set
            members.start, members.stride, members.size = source, target - source, 2
            self._post(request, arguments)
        return request

    def fits(self, request: Request, nbytes: int, tag: int) -> bool:
        """Return whether so many bytes came: it carries no signature."""
        assert request.header is not None
        return int(request.header[0]) == nbytes

    def received(self, request: Request) -> Received:
        """Return the source and the bytes of a message that was received."""
        assert request.header is not None
        return Received(request.source, int(request.header[0]))

    def too_long(self, error: BaseException) -> None:
        """Return ``None``: UCC does not say which message it was."""

    def explain(self, error: BaseException) -> str | None:
        """Return the reason that UCC gives."""
        return f"UCC reports: {error}" if isinstance(error, UCCError) else None

    # -- the end -----------------------------------------------------------------

    def abandon(self, requests: Sequence[tuple[Request, Flat, bool]]) -> None:
        """Keep the context and what is in flight; nothing advances them any more."""
        in_flight, self._in_flight = self._in_flight, set()
        writes = any(request.writes for request in in_flight)
        abandoned.keep(self._context, in_flight, writes)

    def close(self) -> None:
        """Free the context: nothing is in flight."""
        closing = threading.Thread(
            target=abandoned.destroy,
            args=(self._context,),
            name="rankscope-ucc-close",
            daemon=True,
        )
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            _log.warning("UCC still waits for a rank while a group of it is closed")
