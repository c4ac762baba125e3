"""The handshake of a connection: both ends prove that they have the group's key.

The end that accepts sends a number, the end that connects its rank, a number of its own
and the HMAC of all that under the key of this listener, which answers with an HMAC of
both numbers. The keys go through the group's store, which only the ranks can read, and
are made anew for each generation: a recorded handshake is of no use later. Nothing that
a socket receives before its handshake is taken for a message.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

__all__ = ["KEY_SIZE", "Accepting", "greet", "receive_exactly"]

#: Bytes of a listener's key.
KEY_SIZE = 32
_NONCE, _PROOF = 16, 32
_HELLO = struct.Struct(f"<I{_NONCE}s{_PROOF}s")


class Accepting:
    """A socket that a listener has accepted, until its other end has proved itself."""

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        self.socket = sock
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE)
        self._hello = b""
        sock.setblocking(False)
        sock.send(self._nonce)

    def advance(self) -> int | None:
        """Return the rank at the other end once it has proved itself, else ``None``."""
        try:
            part = self.socket.recv(_HELLO.size - len(self._hello))
        except BlockingIOError:
            return None
        if not part:
            raise ConnectionResetError("it closed the connection")
        self._hello += part
        if len(self._hello) < _HELLO.size:
            return None
        rank, nonce, proof = _HELLO.unpack(self._hello)
        if not hmac.compare_digest(proof, _prove(self._key, rank, self._nonce, nonce)):
            raise PermissionError("it does not have the group's key")
        self.socket.send(_answer(self._key, self._nonce, nonce))
        return int(rank)


def greet(sock: socket.socket, rank: int, key: bytes) -> None:
    """Prove to a listener that this is `rank`, and have it prove itself."""
    theirs, own = receive_exactly(sock, _NONCE), secrets.token_bytes(_NONCE)
    sock.sendall(_HELLO.pack(rank, own, _prove(key, rank, theirs, own)))
    answer = receive_exactly(sock, _PROOF)
    if not hmac.compare_digest(answer, _answer(key, theirs, own)):
        raise PermissionError("the listener does not have the group's key")


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Return the next `count` bytes; raise `OSError` where they do not come."""
    received = b""
    while len(received) < count:
        part = sock.recv(count - len(received))
        if not part:
            raise ConnectionResetError("it closed the connection")
        received += part
    return received


def _prove(key: bytes, rank: int, listener: bytes, caller: bytes) -> bytes:
    message = struct.pack("<cI", b"c", rank) + listener + caller
    return hmac.digest(key, message, "sha256")


def _answer(key: bytes, listener: bytes, caller: bytes) -> bytes:
    return hmac.digest(key, b"a" + listener + caller, "sha256")
