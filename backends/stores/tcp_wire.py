"""Constants of the protocol between server and clients of a TCP store."""

from __future__ import annotations

import socket

from ..errors import DistNetworkError

__all__ = ["GOODBYE", "MAX_MESSAGE", "endpoint_of"]

#: Largest message in bytes. A value of a rendezvous is an address or a few pickled
#: objects; the bound keeps a client with a bug from filling the memory of rank 0.
MAX_MESSAGE = 256 << 20

#: Status that the server sends, without a request, before an orderly end.
GOODBYE = b"goodbye"


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
