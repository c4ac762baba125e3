"""TCPTransport: the messages of a group over its connections."""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import struct
import termios
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import DistError
from ..messaging.algorithms import Flat
from ..messaging.sleeping import Sleeper
from ..messaging.transport import ANY_SOURCE, TRUNCATED, Received
from .connection import Connection
from .matching import Matching, Request, TruncationError, as_bytes
from .peer_memory import PeerMemory

__all__ = ["TCPTransport"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

# Seconds that close() may take until the other hosts have everything.
_FLUSH_SECONDS = 0.5


class TCPTransport:
    """Messages over one socket to each other rank; see `Transport`."""

    max_message = 1 << 60
    #: A wake-up takes 30 to 60 µs, and a thread that spins yields its core.
    spin = 1e-3

    def __init__(
        self, sockets: Mapping[int, Any], memories: Mapping[int, PeerMemory]
    ) -> None:
        self._matching = Matching()
        self._connections = {
            peer: Connection(
                sock, peer, self._matching, memories.get(peer), self._changed
            )
            for peer, sock in sockets.items()
        }
        # How many ranks have not left, and the error of what the last one was to send.
        self._left = len(self._connections)
        self._last_lost: DistError | None = None
        self._sleeper = Sleeper()
        self._selector = self._sleeper.selector
        self.wake, self.fileno = self._sleeper.wake, self._sleeper.fileno
        # The connections whose sockets have not taken everything.
        self._writing = set[Connection]()
        for connection in self._connections.values():
            self._selector.register(connection.socket, _READ, connection)
        _transports.add(self)

    # -- messages ----------------------------------------------------------

    def send(self, array: Flat, peer: int, tag: int) -> Request | None:
        return self._connections[peer].send(array, tag)

    def receive(self, array: Flat, source: int, tag: int) -> Request | None:
        connection = None if source == ANY_SOURCE else self._connections[source]
        request = Request(as_bytes(array), connection, source, tag)
        arrival = self._matching.post(request)
        if arrival is None:
            lost = self._last_lost if connection is None else connection.lost
            over = not self._left if connection is None else connection.ended
            if over and lost is not None:
                raise lost.with_traceback(None)
            return request
        self._connections[arrival.source].claim(request, arrival)
        if (
            connection is None
            or not request.done
            or request.error is not None
            or request.nbytes != len(request.view)
            or arrival.tag != tag
        ):
            return request
        return None

    def test(self, request: Request, looks: int = 1) -> bool:
        connection = request.connection
        if not request.done:
            if connection is not None and not self._writing:
                # Its own socket alone; of the others it is enough to look now and then.
                for _ in range(looks - 1):
                    if connection.reads:
                        connection.read_memory()
                    elif not connection.ended:
                        connection.read()
                    if request.done:
                        break
            if not request.done:
                self._advance()
        if request.error is not None:
            raise request.error
        return request.done

    def fits(self, request: Request, nbytes: int, tag: int) -> bool:
        return request.nbytes == nbytes and request.tag == tag

    def received(self, request: Request) -> Received:
        return Received(request.source, request.nbytes, request.tag)

    def unread(self, tag: int) -> Received | None:
        matching = self._matching
        if not matching.signed:
            return None
        arrival = matching.unread(tag)
        if arrival is None:
            return None
        return Received(arrival.source, arrival.nbytes, arrival.tag)

    def too_long(self, error: BaseException) -> Received | None:
        return error.message if isinstance(error, TruncationError) else None

    def explain(self, error: BaseException) -> str | DistError | None:
        if isinstance(error, TruncationError):
            return TRUNCATED
        return error if isinstance(error, DistError) else None

    def _advance(self) -> None:
        for key, events in self._selector.select(0):
            connection = key.data
            if connection is None:
                continue
            if events & _WRITE:
                connection.flush()
                if not (connection.wants_to_write or connection.ended):
                    self._writing.discard(connection)
                    self._selector.modify(connection.socket, _READ, connection)
            if events & _READ and not connection.ended:
                connection.read()
        for connection in self._connections.values():
            if connection.reads:
                connection.read_memory()

    def _changed(self, connection: Connection) -> None:
        """Look for what `connection` waits for from now on."""
        if not connection.ended:
            self._writing.add(connection)
            self._selector.modify(connection.socket, _READ | _WRITE, connection)
            return
        self._writing.discard(connection)
        self._selector.unregister(connection.socket)
        self._left -= 1
        self._last_lost = connection.lost
        for request in self._matching.lose(connection.peer, not self._left):
            request.end(connection.lost)

    # -- waiting -----------------------------------------------------------

    def arm(self) -> bool:
        if any(connection.reads for connection in self._connections.values()):
            return False
        return self._sleeper.arm()

    def sleep(self, timeout: float, idle: float) -> None:
        self._sleeper.sleep(timeout)

    # -- the end -----------------------------------------------------------

    def kinds(self) -> dict[int, tuple[str, ...]]:
        """Return what the bytes to each rank go through: ``("unix", "cma")``."""
        found = {}
        for peer, connection in self._connections.items():
            names = [kind_of(connection.socket)]
            if connection.memory is not None:
                names.append("cma")
            found[peer] = tuple(names)
        return found

    def abandon(self, requests: Sequence[tuple[Request, Flat, bool]]) -> None:
        """Hang up: the other ranks read no more of this one's memory."""
        self._end(hang_up=True)

    def close(self) -> None:
        """Send what the sockets have not taken yet, and close them."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while self._unsent() and time.monotonic() < deadline:
            self._advance()
            time.sleep(1e-4)
        self._end(hang_up=False)

    def _unsent(self) -> bool:
        """Return whether a message has not reached the other rank's host.

        A socket that is closed before may lose it, once the other rank sends something.
        """
        return bool(self._writing) or any(
            not connection.ended and _bytes_on_the_way(connection.socket)
            for connection in self._connections.values()
        )

    def _end(self, hang_up: bool) -> None:
        def close() -> None:
            for connection in self._connections.values():
                if hang_up and not connection.ended:
                    connection.hang_up()
                connection.close()

        self._sleeper.end(close)

    def disown(self) -> None:
        """In a forked child: close the sockets, which are the parent's.

        The parent goes on with them; but the other ranks see its end only once no
        process has them.
        """
        for connection in self._connections.values():
            connection.close()
        self._sleeper.disown()


# Those of this process, for its forked children.
_transports: weakref.WeakSet[TCPTransport] = weakref.WeakSet()


def _disown_all() -> None:
    for transport in list(_transports):
        transport.disown()


os.register_at_fork(after_in_child=_disown_all)


def kind_of(sock: Any) -> str:
    """Return ``unix``, ``tcp`` or ``tls``."""
    return getattr(sock, "kind", "") or (
        "unix" if sock.family == getattr(socket, "AF_UNIX", None) else "tcp"
    )


def _bytes_on_the_way(sock: Any) -> int:
    if kind_of(sock) == "unix":
        return 0  # they are with the other rank
    count = bytearray(struct.calcsize("i"))
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    except OSError:
        return 0  # a system that does not tell
    return int(struct.unpack("i", count)[0])
