"""The serving half of the TCP store: one thread in rank 0's process."""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from .errors import DistNetworkError, DistStoreError
from .store import MAX_DIGITS, sum_of
from .store_key import CurveKeys

__all__ = ["GOODBYE", "MAX_MESSAGE", "TCPStoreServer", "endpoint_of"]

_log = logging.getLogger(__name__)

# One value of a rendezvous is an address or a few pickled objects; the bound
# keeps a confused client from filling the memory of rank 0.
MAX_MESSAGE = 256 << 20

#: What the master tells its clients before it ends, unasked.
GOODBYE = b"goodbye"

# Seconds after a connection broke at which is looked whose it was, and for which a
# will waits: backends, which hear of a death at once, know more of it.
_LOOKS = (0.01, 0.03, 0.1, 0.3, 1.0)
_RESPITE = 0.5
# Milliseconds that the goodbye gets to leave.
_LINGER_MS = 200

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"

# A client of the table: its routing id and the number it gave its request.
Ticket = tuple[bytes, bytes]
Reply = tuple[bytes, list[bytes]]


class KeyTable:
    """The keys, and who waits for which: the store without its sockets.

    `handle` takes a request and returns ``(status, payload)``, or ``None``
    when the answer has to wait. Answers that a request sets free are given to
    `answer`.
    """

    def __init__(
        self, answer: Callable[[Ticket, bytes, Sequence[bytes]], object]
    ) -> None:
        self._answer = answer
        self._values: dict[bytes, bytes] = {}
        # What each waiting request still misses, and the reverse of it.
        self._missing: dict[Ticket, set[bytes]] = {}
        self._wanted: dict[bytes, list[Ticket]] = {}
        self._keys_of: dict[Ticket, list[bytes]] = {}
        #: Client → what is to be set, and to what, when it is gone.
        self.wills: dict[bytes, dict[bytes, bytes]] = {}

    def handle(self, ticket: Ticket, op: bytes, args: list[bytes]) -> Reply | None:
        """Do `op`; raises `DistStoreError` or `ValueError` for a bad request."""
        if op == b"set":
            key, value = args
            self._put(key, value)
            return b"ok", []
        if op == b"get":
            return self._get(ticket, args)
        if op == b"add":
            key, amount = args
            if len(amount) > MAX_DIGITS:
                raise ValueError(f"add: an amount of {len(amount)} digits")
            total = sum_of(key.decode(), self._values.get(key), int(amount))
            self._put(key, total)
            return b"ok", [total]
        if op == b"swap":
            key, expected, desired = args
            held = self._values.get(key, b"")
            if held == expected:
                self._put(key, desired)
                held = desired
            return b"ok", [held]
        if op == b"check":
            return b"ok", [b"1" if all(key in self._values for key in args) else b"0"]
        if op == b"delete":
            (key,) = args
            return b"ok", [b"0" if self._values.pop(key, None) is None else b"1"]
        if op == b"count":
            return b"ok", [b"%d" % len(self._values)]
        if op == b"will":
            left = dict(zip(args[::2], args[1::2], strict=True))
            self.wills.setdefault(ticket[0], {}).update(left)
            return b"ok", []
        if op == b"unwill":
            self.wills.pop(ticket[0], None)
            return b"ok", []
        if op == b"drop":
            (number,) = args
            self._drop((ticket[0], number))
            return None
        raise ValueError(f"unknown operation {op!r}")

    def execute(self, client: bytes) -> None:
        """Do what a client that is gone has left to do."""
        for key, value in self.wills.pop(client, {}).items():
            if not self._values.get(key):
                self._put(key, value)

    def _get(self, ticket: Ticket, keys: list[bytes]) -> Reply | None:
        missing = {key for key in keys if key not in self._values}
        if not missing:
            return b"ok", [self._values[key] for key in keys]
        if ticket in self._missing:
            # Else the first would wait under a ticket that nothing leads to.
            raise ValueError(f"request {ticket[1]!r} waits already")
        self._missing[ticket] = missing
        self._keys_of[ticket] = keys
        for key in missing:
            self._wanted.setdefault(key, []).append(ticket)
        return None

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for ticket in self._wanted.pop(key, ()):
            missing = self._missing[ticket]
            missing.discard(key)
            # A key that was set and deleted again counts as having come.
            if not missing:
                del self._missing[ticket]
                keys = self._keys_of.pop(ticket)
                self._answer(ticket, b"ok", [self._values.get(k, b"") for k in keys])

    def _drop(self, ticket: Ticket) -> None:
        """Give up a waiting request; its answer names what it still missed."""
        missing = self._missing.pop(ticket, None)
        if missing is None:
            return
        keys = self._keys_of.pop(ticket)
        for key in missing:
            waiting = self._wanted[key]
            waiting.remove(ticket)
            if not waiting:
                del self._wanted[key]
        self._answer(ticket, b"missing", [key for key in keys if key in missing])


class TCPStoreServer:
    """Serve a `KeyTable` at `host`:`port` to whoever has the keys."""

    def __init__(self, host: str, port: int, keys: CurveKeys) -> None:
        self._keys = keys
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._router = self._context.socket(zmq.ROUTER)
        self._table = KeyTable(self._send)
        #: Whether the clients are told that this end is no failure.
        self.orderly = False
        # When to see who is gone, and clients that are → when to execute their wills.
        self._looks: list[float] = []
        self._gone: dict[bytes, float] = {}
        self._monitor = self._router.get_monitor_socket(zmq.Event.DISCONNECTED)
        try:
            self._zap.bind(_ZAP_ENDPOINT)
            self.port = self._bind(host, port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # Reentrant: a store that is collected as garbage closes its server on
        # whatever thread the collector runs.
        self._lock = threading.RLock()
        # The thread ends when the writing end is closed.
        self._stop, self._stopper = os.pipe()
        self._thread = threading.Thread(
            target=self._serve, name="rankscope-store-server", daemon=True
        )
        self._thread.start()

    def _bind(self, host: str, port: int) -> int:
        router = self._router
        router.curve_server = True
        router.curve_secretkey = self._keys.server_secret
        router.zap_domain = b"rankscope"
        # Knowing the server's public key must not be enough: the ZAP handler
        # below admits the one client key, and no handler means no admission.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.maxmsgsize = MAX_MESSAGE
        # A send to a client that is gone must fail, not vanish unseen; a slow
        # client must not block the others (it is owed one answer per request).
        router.router_mandatory = True
        router.sndhwm = router.rcvhwm = 0
        endpoint = endpoint_of(host, port)
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
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap, self._router, self._monitor, self._stop):
            poller.register(source, zmq.POLLIN | zmq.POLLERR)
        try:
            while self._stop not in (ready := dict(poller.poll(self._pause()))):
                self._look_after_wills()
                if self._monitor in ready:
                    recv_monitor_message(self._monitor)
                    # Who it was is known a moment later. The next look stays: many
                    # that come and go put it off no further.
                    now = time.monotonic()
                    later = [now + pause for pause in _LOOKS]
                    self._looks = [*self._looks[:1], *later]
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
            self._context.destroy(linger=_LINGER_MS)
            os.close(self._stop)

    def _pause(self) -> int | None:
        """Milliseconds until there is something to do unasked."""
        times = [*self._looks[:1], *self._gone.values()]
        if not times:
            return None
        return max(0, math.ceil(1000 * (min(times) - time.monotonic())))

    def _look_after_wills(self) -> None:
        now = time.monotonic()
        if self._looks and now >= self._looks[0]:
            self._looks = [when for when in self._looks if when > now]
            for client in self._table.wills.keys() - self._gone.keys():
                if not self._send((client, b""), b"there?", ()):
                    self._gone[client] = now + _RESPITE
        for client in [one for one, when in self._gone.items() if now >= when]:
            del self._gone[client]
            self._table.execute(client)

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
        try:
            reply = self._table.handle(ticket, op, args)
        except (DistStoreError, ValueError) as error:
            reply = b"error", [str(error).encode()]
        if reply is not None:
            self._send(ticket, *reply)

    def _send(self, ticket: Ticket, status: bytes, payload: Sequence[bytes]) -> bool:
        """Send an answer, or a word unasked; say whether the client is there."""
        try:
            self._router.send_multipart([*ticket, status, *payload], zmq.NOBLOCK)
            return True
        except zmq.ZMQError as error:
            # The client is gone, and with it whoever waited for this answer.
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return error.errno != errno.EHOSTUNREACH


def endpoint_of(host: str, port: int) -> str:
    """Return the ZeroMQ endpoint of `host`, a name or an address of either family.

    ZeroMQ binds to addresses and interfaces only, not to names.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DistNetworkError(
            f"the host name {host!r} cannot be resolved ({error.strerror}): "
            "check MASTER_ADDR"
        ) from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, address = found[0][0], found[0][4][0]
    shown = f"[{address}]" if family == socket.AF_INET6 else address
    return f"tcp://{shown}:{port or '*'}"
