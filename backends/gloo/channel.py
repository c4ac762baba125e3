"""The rank's end of the socket on which commands go out and reports come in."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from .fd_poller import FdPoller

__all__ = ["Channel"]


class Channel:
    """A socket that never blocks its sender, and what the poller waits for on it.

    Messages that the socket does not take are queued; the poller reports when
    there is room, and `flush` sends them. The caller sees to it that `send` and
    `flush` do not overlap.
    """

    def __init__(self, end: socket.socket, poller: FdPoller) -> None:
        self._socket = end
        self._poller = poller
        self._unsent: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._events = 0
        #: Whether the poller is asked to report that a message can be read.
        self.wants_input = False

    # -- sending -----------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Send `message`, behind those that wait for room."""
        if not self._unsent:
            try:
                self._socket.send(message, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass  # the socket is full
            except (BrokenPipeError, ConnectionResetError):
                return  # the process has ended; the poller reports it
            else:
                return
        self._unsent.append(message)
        self._want(select.EPOLLOUT, True)

    def flush(self) -> None:
        """Send what waits for room, as far as there is room now."""
        unsent, self._unsent = self._unsent, deque()
        for message in unsent:
            self.send(message)
        self._want(select.EPOLLOUT, bool(self._unsent))

    # -- receiving ---------------------------------------------------------

    def receive_into(self, buffer: bytearray) -> int:
        """Receive one message; return its length, 0 at the end of the stream."""
        try:
            return self._socket.recv_into(buffer)
        except ConnectionResetError:
            return 0  # the process ended with commands unread

    def readable(self, timeout: float) -> bool:
        """Whether a message, or the end of the stream, comes within `timeout` s."""
        poll = select.poll()  # select() ends at descriptor 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    # -- the poller --------------------------------------------------------

    def want_input(self, wanted: bool) -> None:
        """Have the poller report, or not, that a message can be read."""
        self.wants_input = wanted
        self._want(select.EPOLLIN, wanted)

    def _want(self, event: int, wanted: bool) -> None:
        with self._lock:
            events = self._events | event if wanted else self._events & ~event
            if events != self._events:
                self._events = events
                self._poller.change(self._socket.fileno(), events)

    def watch(self, callback: Callable[[int], None]) -> None:
        """Have the poller call ``callback(events)``; on the poller's thread."""
        with self._lock:
            self._poller.watch(self._socket.fileno(), callback, self._events)

    def unwatch(self) -> None:
        """Take the socket from the poller; on the poller's thread."""
        self._poller.forget(self._socket.fileno())

    def close(self) -> None:
        """Close the socket, which the poller must not watch any more."""
        self._socket.close()
