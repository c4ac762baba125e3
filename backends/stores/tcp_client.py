"""The connecting half of the TCP store: one socket, its thread, its requests."""

from __future__ import annotations

import collections
import itertools
import logging
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import (
    DistError,
    DistNetworkError,
    DistNetworkTimeoutError,
    DistStoreError,
)
from ..resending import resend_each_second
from ..thread_start import start_thread
from .base import join, remaining
from .process_end import ProcessEnd, is_stopped, process_end
from .tcp_keys import GOODBYE, MAX_MESSAGE, CurveKeys, endpoint_of, zmq_context

__all__ = ["Request", "TCPStoreClient"]

_log = logging.getLogger(__name__)

# Successive refusals, each right after the connection set-up, that prove a wrong
# key. A single refusal may be that of a server that is about to end.
_REFUSALS = 3

# Seconds from the loss of the connection to the end of the process that served it: the
# kernel closes the sockets of a process before it ends the process.
_END_WAIT = 0.5


@dataclass(slots=True, eq=False)
class Request:
    """A request to the server, and its answer once the answer has arrived."""

    number: bytes
    callback: Callable[[Sequence[bytes]], None] | None
    done: threading.Event = field(default_factory=threading.Event)
    status: bytes = b""
    payload: list[bytes] = field(default_factory=list)
    error: str | None = None
    #: The rank that served the store, where its loss is the error.
    culprits: tuple[int, ...] = ()

    def result(self) -> list[bytes]:
        if self.status == b"lost":
            raise DistNetworkError(self.error, culprits=self.culprits)
        if self.status == b"closed":
            raise DistStoreError(self.error)
        if self.status != b"ok":
            raise DistStoreError(b" ".join(self.payload).decode(errors="replace"))
        return self.payload

    def call_back(self) -> None:
        """Call the callback with the values, unless it was dropped meanwhile."""
        callback = self.callback
        if callback is not None and self.status == b"ok":
            callback(self.payload)


class TCPStoreClient:
    """The connection of one store object: a socket and the thread that owns it.

    A ZeroMQ socket belongs to one thread. Callers put their frames in a queue, wake
    the thread through a pipe, and each waits for the answer to its own request.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: CurveKeys,
        server: str,
        served_by: tuple[int, ...] = (),
    ) -> None:
        self._where, self._server = f"{host}:{port}", server
        # The rank that serves the store, if one does for all of its life.
        self._served_by = served_by
        endpoint = endpoint_of(host, port)
        self._numbers = itertools.count(1)
        # Reentrant: the garbage collector may close the store on any thread.
        self._lock = threading.RLock()
        self._pending: dict[bytes, Request] = {}
        self._outgoing: collections.deque[list[bytes]] = collections.deque()
        # The callbacks of watches, which run off the socket's thread: they may need it.
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._caller: threading.Thread | None = None
        # Why no more requests are accepted: a status, its message and the culprits.
        self._end: tuple[bytes, str, tuple[int, ...]] | None = None
        self._settled = threading.Event()
        self._connected = False
        # Whether the server has sent its goodbye, and the callbacks for a loss of the
        # server without one.
        self._goodbye = False
        self._watching_loss: list[Callable[[str], None]] = []
        # The end of the server's process, if it runs on this host.
        self._server_end: ProcessEnd | None = None
        self._refusals = 0
        self._connected_at = 0.0

        self._context = zmq_context(host, port)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = keys.server_public
        self._socket.curve_publickey = keys.client_public
        self._socket.curve_secretkey = keys.client_secret
        self._socket.maxmsgsize = MAX_MESSAGE
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.linger = 0
        self._socket.ipv6 = "[" in endpoint
        self._socket.reconnect_ivl = 50
        self._socket.reconnect_ivl_max = 1000
        # A host that fails sends no FIN. libzmq's own thread answers heartbeats,
        # so a master that computes, or holds the GIL, does not count as dead.
        self._socket.heartbeat_ivl = 10_000
        self._socket.heartbeat_timeout = 30_000
        self._monitor = self._socket.get_monitor_socket()
        self._wake_receive, self._wake_send = os.pipe()
        os.set_blocking(self._wake_send, False)
        self._socket.connect(endpoint)
        self._thread = start_thread("store", self._run)

    # -- called from any thread ---------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether requests are refused: the client was closed, or the server lost."""
        return self._end is not None

    def disown(self) -> None:
        """In a forked child: refuse requests, as the thread is the parent's."""
        self._lock = threading.RLock()
        self._pending.clear()
        self._end = (
            b"closed",
            f"the store at {self._where} belongs to the process that forked this one",
            (),
        )

    def connect(self, timeout: float) -> None:
        """Wait until the server has accepted this client."""
        if not self._settled.wait(timeout):
            raise DistNetworkTimeoutError(
                f"no store answered at {self._where} within {timeout:g} s: is "
                f"{self._server} running, on the host that MASTER_ADDR names, and is "
                f"the port open to {platform.node()}?"
            )
        if self._end is not None:
            _, message, culprits = self._end
            raise DistNetworkError(message, culprits=culprits)

    def submit(
        self,
        op: bytes,
        args: Sequence[bytes],
        callback: Callable[[Sequence[bytes]], None] | None = None,
    ) -> Request:
        """Send a request; if given, `callback` is called with the values."""
        size = sum(map(len, args))
        if size > MAX_MESSAGE - 4096:
            raise ValueError(
                f"{op.decode()}: {size} bytes are more than a store takes "
                f"({MAX_MESSAGE - 4096}); send arrays with collectives instead"
            )
        request = Request(next(self._numbers).to_bytes(8, "big"), callback)
        with self._lock:
            if self._end is not None:
                request.status, request.error, request.culprits = self._end
                request.result()
            self._pending[request.number] = request
            self._outgoing.append([request.number, op, *args])
            if callback is not None:
                self._start_caller()
            self._wake()
        return request

    def _start_caller(self) -> None:
        if self._caller is None:
            # Python 3.12 starts none at its end: then `close` must not join it.
            self._caller = start_thread("store-watch", self._call_back)

    def watch_loss(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call ``callback(message)`` if the server ends without a goodbye."""
        with self._lock:
            self._watching_loss.append(callback)
            self._start_caller()

        def cancel() -> None:
            with self._lock:
                if callback in self._watching_loss:
                    self._watching_loss.remove(callback)

        return cancel

    def watch_server(self, process: bytes) -> None:
        """Find out how `process`, which serves the store, ends (`own_process`)."""
        end = process_end(process)
        with self._lock:
            if self._end is None:
                self._server_end = end
                return
        if end is not None:
            end.close()

    def forget(self, request: Request) -> None:
        """Drop `request`, for which no thread waits any more."""
        with self._lock:
            self._pending.pop(request.number, None)

    def send_drop(self, request: Request) -> None:
        """Have the server give up `request`; its answer names the missing keys."""
        with self._lock:
            if self._end is None and request.number in self._pending:
                self._outgoing.append([bytes(8), b"drop", request.number])
                self._wake()

    def drop(self, request: Request) -> None:
        """Give up `request` on both sides."""
        request.callback = None
        self.send_drop(request)
        self.forget(request)

    def no_answer(self) -> DistNetworkTimeoutError:
        """Return the error for a server that is connected but does not answer."""
        end = self._server_end
        stopped = end is not None and is_stopped(end.pid)
        why = "is stopped or overloaded, or its host is out of reach"
        if end is not None and stopped:
            why = (
                f"(pid {end.pid}) is stopped (SIGSTOP, or a debugger): kill -CONT "
                f"{end.pid} continues it"
            )
        return DistNetworkTimeoutError(
            f"the store at {self._where} does not answer: the process of "
            f"{self._server} {why}",
            culprits=self._served_by if stopped else (),
        )

    def close(self) -> None:
        """End the thread, the socket and every wait."""
        self._finish(
            b"closed", f"the store at {self._where} was closed by this process"
        )
        with self._lock:
            self._wake()
        for thread in (self._thread, self._caller):
            if thread is not None:
                join(thread, f"the thread {thread.name} of the store at {self._where}")

    # -- the thread ----------------------------------------------------------

    def _wake(self) -> None:
        # Under the lock: the thread closes the pipe under it too.
        if self._wake_send >= 0:
            try:
                os.write(self._wake_send, b"\0")
            except BlockingIOError:
                pass  # the pipe is full of wake-ups: the thread wakes up

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._wake_receive, self._monitor, self._socket):
            poller.register(source, zmq.POLLIN)
        try:
            while self._end is None:
                ready = dict(poller.poll())
                if self._wake_receive in ready:
                    os.read(self._wake_receive, 4096)
                    while self._outgoing:
                        self._socket.send_multipart(self._outgoing.popleft())
                if self._socket in ready:
                    self._receive(self._socket.recv_multipart())
                if self._monitor in ready:
                    self._notice(recv_monitor_message(self._monitor))
        finally:
            self._finish(b"lost", f"the client thread of the store {self._where} ended")
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._context.destroy(linger=0)
            with self._lock:
                os.close(self._wake_receive)
                os.close(self._wake_send)
                self._wake_send = -1
                if self._server_end is not None:
                    self._server_end.close()
                    self._server_end = None
            self._calls.put(None)

    def _call_back(self) -> None:
        """Run callbacks of watches, off the thread of the socket: they may need it."""
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - whatever a callback raises
                if self.ended and isinstance(error, DistError):
                    # It used the store, which has ended meanwhile.
                    _log.debug("a callback of a store's watch: %s", error)
                else:
                    _log.exception("a callback of a store's watch failed")

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) < 2:
            _log.warning("store: ignored an answer of %d frames", len(frames))
            return
        number, status, *payload = frames
        if status == GOODBYE:
            self._goodbye = True
            return
        with self._lock:
            request = self._pending.pop(number, None)
        if request is None:
            return
        request.status, request.payload = status, payload
        request.done.set()
        if request.callback is not None:
            self._calls.put(request.call_back)

    def _notice(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == zmq.Event.CONNECTED:
            self._connected_at = time.monotonic()
            resend_each_second(event["value"])
        elif kind == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._connected = True
            self._settled.set()
        elif kind == zmq.Event.DISCONNECTED and self._connected:
            # The server tracks the waits of a client by its connection:
            # over a new connection the waits would never end.
            self._finish(
                b"lost",
                f"the connection to the store at {self._where} was lost: the process "
                f"of {self._server} ended{self._how()}; the group must be made again",
                self._served_by,
            )
        elif kind in (
            zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
            zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
            zmq.Event.HANDSHAKE_FAILED_AUTH,
        ):
            # libzmq reports a handshake that timed out (30 s) the same way.
            if remaining(self._connected_at + 10.0) == 0.0:
                return
            self._refusals += 1
            if self._refusals >= _REFUSALS:
                self._finish(
                    b"lost",
                    f"the store at {self._where} refused this rank: its key is another "
                    "one (set the same RANKSCOPE_KEY on every rank), or what listens "
                    "there is no store of this Rankscope version",
                )

    def _how(self) -> str:
        """Return how the process that served the store ended, as far as is known."""
        # After a goodbye the loss is no failure, and the process may live on.
        if self._server_end is not None and not self._goodbye:
            known = self._server_end.known(_END_WAIT)
            if known is not None:
                return f" ({known})"
        return ", or the network failed"

    def _finish(
        self, status: bytes, message: str, culprits: tuple[int, ...] = ()
    ) -> None:
        """Refuse further requests and end pending ones; the first reason is kept."""
        with self._lock:
            if self._end is not None:
                return
            self._end = status, message, culprits
            pending = list(self._pending.values())
            self._pending.clear()
            watching = self._watching_loss if status == b"lost" else []
            self._watching_loss = []
        self._settled.set()
        if not self._goodbye:
            for callback in watching:
                self._calls.put(partial(callback, message))
        for request in pending:
            request.status, request.error = status, message
            request.culprits = culprits
            request.done.set()
