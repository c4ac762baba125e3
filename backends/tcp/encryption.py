"""Encryption between hosts: TLS of the standard library, without certificates.

The ranks have a secret in common already, by which each connection proves who is at its
other end (`handshake`). So TLS only has to agree on keys, and needs no certificate: an
anonymous Diffie-Hellman exchange, whose channel binding (RFC 5929) both ends then prove
to have in common. Somebody between them would have two channels. TLS 1.3 has no such
exchange, and Python offers no other binding.
"""

from __future__ import annotations

import hmac
import os
import ssl
import tempfile
from collections.abc import Sequence
from typing import Any

from .handshake import receive_exactly

__all__ = ["EncryptedSocket", "encrypt"]

_CIPHER = "ADH-AES256-GCM-SHA384:@SECLEVEL=0"
# The group ffdhe2048 of RFC 7919.
_GROUP = """\
-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""


class EncryptedSocket:
    """A TLS socket with the calls that a `Connection` makes, and their errors."""

    kind = "tls"

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self.fileno, self.close = sock.fileno, sock.close
        self.setblocking, self.family = sock.setblocking, sock.family

    def sendmsg(self, views: Sequence[Any]) -> int:
        """Send some of the first of `views`; return how many bytes were taken."""
        try:
            return self._socket.send(views[0])
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError) as error:
            raise BlockingIOError from error

    def recv_into(self, view: memoryview) -> int:
        """Receive into `view`; 0: the other end is closed."""
        try:
            return self._socket.recv_into(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        except ssl.SSLEOFError:
            return 0

    def shutdown(self, how: int) -> None:
        """Shut the connection down, without TLS's goodbye, which may block."""
        self._socket.shutdown(how)


def encrypt(sock: Any, accepted: bool, key: bytes) -> EncryptedSocket:
    """Return `sock`, which blocks, encrypted; raise `OSError` if that fails."""
    side = ssl.PROTOCOL_TLS_SERVER if accepted else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(side)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHER)
    if accepted:
        _choose_group(context)
    secure = context.wrap_socket(sock, server_side=accepted)
    try:
        channel = secure.get_channel_binding() or b""
        secure.sendall(_proof(key, channel, accepted))
        wanted = _proof(key, channel, not accepted)
        given = receive_exactly(secure, len(wanted))
        if not channel or not hmac.compare_digest(given, wanted):
            raise ConnectionAbortedError("somebody is between the two ends of it")
    except BaseException:
        secure.close()  # nobody else has it
        raise
    return EncryptedSocket(secure)


def _proof(key: bytes, channel: bytes, accepted: bool) -> bytes:
    return hmac.digest(key, (b"server" if accepted else b"client") + channel, "sha256")


def _choose_group(context: ssl.SSLContext) -> None:
    # It is read from a file alone.
    descriptor, path = tempfile.mkstemp()
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(_GROUP)
        context.load_dh_params(path)
    finally:
        os.unlink(path)
