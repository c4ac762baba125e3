"""TCPConnector: listens, connects each pair of ranks, and makes the transport.

Ranks that share a host and its network namespace are connected by a Unix socket with an
abstract name, which needs no file, the others by TCP. Of each pair the higher rank
connects. Every rank connects to the lower ones first, in their order, and then accepts
the higher ones.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import struct
import time
from typing import Any

from ..descriptors import REMEDY, allow_descriptors
from ..errors import ConnectionLostError, DistBackendError, DistError
from ..messaging.connecting import MeetingConnector, Namer, own_address
from ..resending import resend_each_second
from ..stores.base import Store
from ..stores.process_end import host_id
from .encryption import encrypt
from .handshake import KEY_SIZE, Accepting, greet, receive_exactly
from .peer_memory import PeerMemory, Probe, allow_siblings
from .transport import TCPTransport

__all__ = ["TRANSPORTS", "TCPConnector", "chosen_transports", "wants_encryption"]

#: What may be used between ranks of one host, a list of ``unix`` and ``cma``: TCP is
#: used between hosts, and where the list does not name ``unix``.
TRANSPORTS = "RANKSCOPE_TCP_TRANSPORTS"
#: 1: encrypt the connections between hosts.
ENCRYPT = "RANKSCOPE_TCP_ENCRYPT"

_KNOWN = ("unix", "cma", "tcp")

# Seconds in which a rank that has published its address has to answer, and how often a
# wait looks for `cancel`.
_PATIENCE, _LOOK = 60.0, 0.05

# Connections that have not proved themselves, beside the expected ones: strangers.
_STRANGERS = 64

# Descriptors beside the sockets to the other ranks, with some for the rank's program.
_SPARE = 128

# Bytes that a socket holds, as far as the system allows them.
_BUFFER = 4 << 20


def chosen_transports() -> frozenset[str]:
    """Return the transports that may be used; `DistBackendError` for a wrong name."""
    text = os.environ.get(TRANSPORTS, "")
    names = frozenset(filter(None, text.replace(" ", "").split(",")))
    unknown = sorted(names.difference(_KNOWN))
    if unknown:
        raise DistBackendError(
            f"{TRANSPORTS} is {text!r}: {', '.join(unknown)} is no transport of the "
            f"tcp backend; expected a list of {', '.join(_KNOWN)}"
        )
    return names or frozenset(_KNOWN)


def wants_encryption() -> bool:
    """Return whether this rank asks for encryption; `DistBackendError` if unclear."""
    text = os.environ.get(ENCRYPT, "0")
    if text not in ("0", "1", ""):
        raise DistBackendError(f"{ENCRYPT} is {text!r}; expected 0 or 1")
    return text == "1"


class TCPConnector(MeetingConnector):
    """Makes the transport of a group once all its members are there."""

    #: What `connect` has returned.
    transport: TCPTransport | None = None

    def __init__(self, store: Store, rank: int, size: int, name: Namer) -> None:
        super().__init__(store, rank, size, name)
        self._sockets: dict[int, Any] = {}
        self._memories: dict[int, PeerMemory] = {}
        self._listeners: list[socket.socket] = []

    def connect(self) -> TCPTransport | None:
        """Return the transport, or ``None`` after `cancel`."""
        allow_descriptors(self._size + _SPARE)
        try:
            self._connect()
            self.transport = TCPTransport(self._sockets, self._memories)
        except BaseException as error:
            for sock in self._sockets.values():
                sock.close()
            if self._cancelled and isinstance(error, (DistError, OSError)):
                return None
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise DistBackendError(
                    f"{self._name([self._rank])} has no file descriptors left for a "
                    f"group of {self._size} ranks, which needs {self._size + 4}: "
                    f"{REMEDY}"
                ) from error
            raise
        finally:
            for listener in self._listeners:
                listener.close()
        return self.transport

    def cancel(self) -> None:
        super().cancel()
        for sock in list(self._sockets.values()):
            with contextlib.suppress(OSError):  # it is not connected
                sock.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> None:
        transports = chosen_transports()
        key = secrets.token_bytes(KEY_SIZE)
        own = {
            "host": _host(),
            "key": key.hex(),
            "unix": self._listen_unix() if "unix" in transports else "",
            "cma": "cma" in transports,
            "encrypt": wants_encryption(),
        }
        members = self._exchange("member", own)
        if any(not self._shares_socket(own, other) for other in members):
            one_host = len({member["host"] for member in members}) == 1
            address = "127.0.0.1" if one_host else own_address(self._store)
            addresses = self._exchange("address", self._listen(address))
            for member, at in zip(members, addresses, strict=True):
                member["address"] = at
        if own["cma"]:
            allow_siblings()
        own = members[self._rank]
        for peer, other in enumerate(members[: self._rank]):
            self._establish(peer, self._call(peer, own, other), own, other)
        self._accept(key, members)

    def _exchange(self, key: str, value: Any) -> list[Any]:
        """Return what all ranks have published under `key`, by rank."""
        return [json.loads(one) for one in self._gather(key, json.dumps(value))]

    @staticmethod
    def _shares_socket(own: dict[str, Any], other: dict[str, Any]) -> bool:
        return own["host"] == other["host"] and bool(own["unix"] and other["unix"])

    # -- listening ---------------------------------------------------------

    def _listen_unix(self) -> str:
        """Return the name of a Unix socket; empty where the system has none."""
        name = f"rankscope-{secrets.token_hex(16)}"
        family = getattr(socket, "AF_UNIX", None)
        if family is None:
            return ""
        listener = socket.socket(family)
        try:
            listener.bind(f"\0{name}")
            listener.listen(self._size + _STRANGERS)
        except OSError:
            listener.close()
            return ""  # no Linux, or forbidden: TCP is for all
        self._listeners.append(listener)
        return name

    def _listen(self, address: str) -> list[Any]:
        """Listen at `address`; return it with its port."""
        listener = socket.create_server(
            (address, 0), family=_family(address), backlog=self._size + _STRANGERS
        )
        self._listeners.append(listener)
        return [address, listener.getsockname()[1]]

    # -- connecting --------------------------------------------------------

    def _call(self, peer: int, own: dict[str, Any], other: dict[str, Any]) -> Any:
        """Return a socket to `peer`, at whose other end it is."""
        unix = self._shares_socket(own, other)
        deadline = time.monotonic() + _PATIENCE
        try:
            where: Any = f"\0{other['unix']}" if unix else tuple(other["address"])
            family = socket.AF_UNIX if unix else _family(where[0])
            while True:
                self._sockets[peer] = sock = socket.socket(family)
                sock.settimeout(_PATIENCE)
                try:
                    sock.connect(where)
                    greet(sock, self._rank, bytes.fromhex(other["key"]))
                    break
                except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                    # Its queue is full, or strangers have taken this rank's place.
                    sock.close()
                    self._check(deadline)
                    time.sleep(_LOOK)
        except OSError as error:
            if self._cancelled or error.errno == errno.EMFILE:
                raise
            host, port = other.get("address", ("", 0))
            more = f"{error} ({TRANSPORTS}=tcp leaves Unix sockets out)"
            if not unix:
                more = f"{error} (at {host}, port {port})"
            raise self._lost(peer, "could not connect to {}", more) from error
        return sock

    def _accept(self, key: bytes, members: list[dict[str, Any]]) -> None:
        """Accept the ranks above this one; strangers get nothing, and block nobody."""
        own, deadline = members[self._rank], time.monotonic() + _PATIENCE
        pending = dict[socket.socket, Accepting]()
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            try:
                while len(self._sockets) < self._size - 1:
                    self._check(deadline)
                    for found, _ in selector.select(_LOOK):
                        sock: Any = found.fileobj
                        if sock in self._listeners:
                            self._take(sock, key, pending, selector)
                            continue
                        if sock not in pending:
                            continue  # it had to make room for another one, just now
                        rank = _advance(pending[sock])
                        if rank is None:
                            continue
                        selector.unregister(sock)
                        del pending[sock]
                        if not self._rank < rank < self._size or rank in self._sockets:
                            sock.close()
                            continue
                        self._sockets[rank] = sock
                        sock.settimeout(_PATIENCE)
                        self._establish(rank, sock, own, members[rank])
            finally:
                for sock in pending:
                    sock.close()

    def _take(
        self,
        listener: socket.socket,
        key: bytes,
        pending: dict[socket.socket, Accepting],
        selector: selectors.BaseSelector,
    ) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return  # it has left again
        try:
            peer = _peer(sock)
            if peer is not None and peer[1] != os.geteuid():
                raise PermissionError("another user's")
            accepting = Accepting(sock, key)
        except OSError:
            sock.close()
            return
        if len(pending) >= self._size + _STRANGERS:
            oldest = next(iter(pending))
            selector.unregister(oldest)
            del pending[oldest]
            oldest.close()
        pending[sock] = accepting
        selector.register(sock, selectors.EVENT_READ)

    def _establish(
        self, peer: int, sock: Any, own: dict[str, Any], other: dict[str, Any]
    ) -> None:
        """Prepare a socket whose other end is `peer`, as it has proved."""
        try:
            if sock.family == getattr(socket, "AF_UNIX", None):
                # Those of TCP grow by themselves, unless they are set.
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
                self._read_probe(peer, sock, readable=own["cma"] and other["cma"])
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                resend_each_second(sock.fileno())
                if own["host"] != other["host"] and own["encrypt"] | other["encrypt"]:
                    accepted = peer > self._rank
                    key = bytes.fromhex((own if accepted else other)["key"])
                    self._sockets[peer] = encrypt(sock, accepted, key)
        except OSError as error:
            raise self._lost(peer, "lost {} while it connected", error) from error
        self._sockets[peer].setblocking(False)

    def _lost(self, peer: int, what: str, why: object) -> ConnectionLostError:
        """Return the error of a peer that has gone: an abort there may be the cause."""
        said = what.format(self._name([peer]))
        text = f"{self._name([self._rank])} {said}: {why}"
        return ConnectionLostError(text, peer=peer, reason=text)

    def _read_probe(self, peer: int, sock: socket.socket, readable: bool) -> None:
        probe = Probe(readable)
        sock.sendall(probe.message)
        pid, _ = _peer(sock) or (0, 0)
        memory = Probe.memory(receive_exactly(sock, Probe.SIZE), pid)
        if memory is not None:
            self._memories[peer] = memory
        # The other end reads this process's probe until it says that it has.
        sock.sendall(b"\0")
        receive_exactly(sock, 1)

    def _check(self, deadline: float) -> None:
        """Raise after `cancel`, and where the ranks have not come in time."""
        if self._cancelled:
            raise DistError("connecting was cancelled")
        if time.monotonic() > deadline:
            missing = {*range(self._size)} - {self._rank} - {*self._sockets}
            raise DistBackendError(
                f"{self._name([self._rank])}: no connection from "
                f"{self._name(sorted(missing))} within {_PATIENCE:g} s"
            )


def _advance(accepting: Accepting) -> int | None:
    """Return the rank that has proved itself, -1 for a stranger, ``None`` till then."""
    try:
        return accepting.advance()
    except OSError:
        return -1


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _host() -> str:
    """Return what ranks that share Unix sockets have in common."""
    try:
        return host_id("net")
    except OSError:
        return socket.gethostname()


def _peer(sock: socket.socket) -> tuple[int, int] | None:
    """Return process and user at the other end of a Unix socket, if that is told."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None or sock.family != socket.AF_UNIX:
        return None
    found = sock.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", found)
    return pid, uid
