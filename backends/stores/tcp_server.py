"""The serving half of the TCP store: one thread in rank 0's process."""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ..errors import DistNetworkError, DistStoreError
from ..resending import resend_each_second
from ..thread_start import start_thread
from .base import OTHER_KEY, OTHER_KEY_HINT, join
from .key_table import KeyTable, Reply, Ticket
from .process_end import ProcessEnd, own_process, process_end
from .tcp_keys import GOODBYE, MAX_MESSAGE, CurveKeys, endpoint_of, zmq_context

__all__ = ["TCPStoreServer"]

_log = logging.getLogger(__name__)

# Seconds from the loss of a connection to the server's check for dead clients, and
# the delay of a last will: backends detect a death at once and have a more specific
# message, which takes precedence if it is set first.
_CHECK_DELAYS = (0.01, 0.03, 0.1, 0.3, 1.0)
_WILL_DELAY = 0.5
# How often, and for how long at most, the end of a process that has closed its
# connection is waited for: a busy host takes longer, and how it ends is known then.
_END_STEP = 0.05
_END_WAIT = 2.0
# Milliseconds for sending the goodbye before the sockets close.
_LINGER_MS = 200

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


def _is_own_name(host: str) -> bool:
    """Return whether `host` is what this host is called, with or without a domain."""
    own = socket.gethostname()
    return own != "localhost" and host.partition(".")[0] == own.partition(".")[0]


class TCPStoreServer:
    """Serve a `KeyTable` at `host`:`port` to clients with the CURVE keys."""

    def __init__(self, host: str, port: int, keys: CurveKeys) -> None:
        self._keys = keys
        self._context = zmq_context(host, port)
        self._zap = self._context.socket(zmq.REP)
        self._router = self._context.socket(zmq.ROUTER)
        self._table = KeyTable(self._send)
        #: Whether the server sends a goodbye at its end, which is then not a failure.
        self.orderly = False
        # Time of the next check for dead clients; dead client → time to set its wills.
        self._checks: list[float] = []
        self._dead: dict[bytes, float] = {}
        #: Dead client → until when the end of its process is waited for.
        self._patience: dict[bytes, float] = {}
        #: The ends of the processes of the clients on this host.
        self._ends: dict[bytes, ProcessEnd] = {}
        self._monitor = self._router.get_monitor_socket(
            zmq.Event.ACCEPTED
            | zmq.Event.DISCONNECTED
            | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
        )
        self._told = False
        try:
            self._zap.bind(_ZAP_ENDPOINT)
            self.port = self._bind(host, port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # Reentrant: a store that is garbage-collected closes its server on the
        # thread on which the collector runs.
        self._lock = threading.RLock()
        # The thread ends when the writing end is closed.
        self._stop, self._stopper = os.pipe()
        self._thread = start_thread("store-server", self._serve)

    def _bind(self, host: str, port: int) -> int:
        router = self._router
        router.curve_server = True
        router.curve_secretkey = self._keys.server_secret
        router.zap_domain = b"rankscope"
        # Knowing the server's public key must not be enough: the ZAP handler
        # below admits the one client key, and no handler means no admission.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.maxmsgsize = MAX_MESSAGE
        # A send to a lost client must fail instead of being dropped; a slow
        # client must not block the others (each request gets one answer).
        router.router_mandatory = True
        router.sndhwm = router.rcvhwm = 0
        endpoint = endpoint_of(host, port)
        if endpoint.startswith("tcp://127.") and _is_own_name(host):
            # As on Debian, 127.0.1.1: other hosts know the name by another address.
            endpoint = f"tcp://*:{port or '*'}"
        router.ipv6 = "[" in endpoint
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            hint = {
                errno.EADDRINUSE: "choose another MASTER_PORT (0: any free one)",
                errno.EADDRNOTAVAIL: "MASTER_ADDR must name the host of rank 0",
                errno.EACCES: "choose a port above 1023",
            }.get(error.errno or 0, "check MASTER_ADDR and MASTER_PORT")
            raise DistNetworkError(
                f"the store cannot listen at {host}:{port} ({error.strerror}): {hint}"
            ) from error
        bound = router.get_string(zmq.LAST_ENDPOINT)
        return int(bound.rpartition(":")[2].rstrip("\0"))

    def close(self) -> None:
        """Stop serving and free thread and sockets."""
        with self._lock:
            if self._stopper >= 0:
                os.close(self._stopper)
                self._stopper = -1
        join(self._thread, f"the server of the store at port {self.port}")

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap, self._router, self._monitor, self._stop):
            poller.register(source, zmq.POLLIN | zmq.POLLERR)
        try:
            while self._stop not in (ready := dict(poller.poll(self._pause()))):
                self._execute_wills()
                if self._monitor in ready:
                    self._notice(recv_monitor_message(self._monitor))
                if self._zap in ready:
                    self._admit(self._zap.recv_multipart())
                if self._router in ready:
                    self._receive(self._router.recv_multipart())
            if self.orderly:
                for client in self._table.wills:
                    self._send((client, b""), GOODBYE, ())
        finally:
            self._router.disable_monitor()
            self._monitor.close(0)
            # In this order: a client that the other socket has not admitted yet would
            # keep the context from its end.
            self._router.close(_LINGER_MS)
            self._zap.close(0)
            self._context.term()
            os.close(self._stop)
            for client in list(self._ends):
                self._forget_process(client)

    def _notice(self, event: Mapping[str, Any]) -> None:
        if event["event"] == zmq.Event.ACCEPTED:
            resend_each_second(event["value"])
            return
        if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._tell_other_key()
        # The router detects the lost client with a delay. The time of the next check is
        # kept, however many connections break.
        now = time.monotonic()
        self._checks = [*self._checks[:1], *(now + pause for pause in _CHECK_DELAYS)]

    def _tell_other_key(self) -> None:
        """Say once that a process was refused: without the key it cannot say so."""
        if self._told:
            return
        self._told = True
        self._table.handle((b"", b""), b"set", [OTHER_KEY.encode(), b""])
        _log.warning("the store at port %d has %s", self.port, OTHER_KEY_HINT)

    def _pause(self) -> int | None:
        """Return the milliseconds until the next task that needs no request."""
        times = [*self._checks[:1], *self._dead.values()]
        if not times:
            return None
        return max(0, math.ceil(1000 * (min(times) - time.monotonic())))

    def _execute_wills(self) -> None:
        now = time.monotonic()
        if self._checks and now >= self._checks[0]:
            self._checks = [when for when in self._checks if when > now]
            for client in self._table.wills.keys() - self._dead.keys():
                if not self._send((client, b""), b"there?", ()):
                    self._dead[client] = now + _WILL_DELAY
                    self._patience[client] = now + _END_WAIT
                    if client in self._ends:
                        # Now: the parent may reap the process before the delay is over.
                        self._ends[client].known()
        for client in [one for one, when in self._dead.items() if now >= when]:
            end = self._ends.get(client)
            if end is not None and end.is_under_way() and now < self._patience[client]:
                self._dead[client] = now + _END_STEP
                continue
            del self._dead[client], self._patience[client]
            self._table.execute(client, self._forget_process(client))

    def _admit(self, request: list[bytes]) -> None:
        # ZAP (rfc.zeromq.org/spec/27): version, request id, domain, address,
        # identity, mechanism, credentials; the credential is the raw key.
        version, number, mechanism = request[0], request[1], request[5]
        admitted = mechanism == b"CURVE" and request[6:] == [
            z85.decode(self._keys.client_public)
        ]
        verdict = (b"200", b"OK") if admitted else (b"400", b"wrong key")
        self._zap.send_multipart([version, number, *verdict, b"", b""])

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) < 3:
            _log.warning("store: ignored a message of %d frames", len(frames))
            return
        client, number, op, *args = frames
        ticket = (client, number)
        reply: Reply | None
        try:
            if op == b"process":
                reply = self._introduce(client, args)
            else:
                reply = self._table.handle(ticket, op, args)
                if op == b"unwill":
                    self._forget_process(client)
        except (DistStoreError, ValueError) as error:
            reply = b"error", [str(error).encode()]
        if reply is not None:
            self._send(ticket, *reply)

    def _introduce(self, client: bytes, args: list[bytes]) -> Reply:
        """Take in which process `client` is; return which one the server is."""
        (process,) = args
        self._forget_process(client)
        end = process_end(process)
        if end is not None:
            self._ends[client] = end
        return b"ok", [own_process()]

    def _forget_process(self, client: bytes) -> str | None:
        """Drop the process of `client`; return how it ended, if that is known."""
        end = self._ends.pop(client, None)
        if end is None:
            return None
        known = end.known()
        end.close()
        return known

    def _send(self, ticket: Ticket, status: bytes, payload: Sequence[bytes]) -> bool:
        """Send an answer or a server message; return whether the client exists."""
        try:
            self._router.send_multipart([*ticket, status, *payload], zmq.NOBLOCK)
            return True
        except zmq.ZMQError as error:
            # The client is gone: no thread waits for this answer any more.
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return error.errno != errno.EHOSTUNREACH
