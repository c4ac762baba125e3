"""What gloo says of a connection that a peer closed, and which peer it was.

gloo's tcp transport throws as soon as a socket closes, which ends the side process: its
last words name the address of the peer: the address on which the peer listens, or that
of the peer's end of the connection. The peers publish both when the ranks connect.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Mapping

from ..errors import ConnectionLostError

__all__ = ["connection_lost"]

_SAID = re.compile(
    r"(?:Connection closed by peer|Socket (?:unexpectedly )?closed|"
    r"(?:Read|Write) error|writev|Pair is not connected) "
    r"\(?(?:\S+ <--> )?\[(?P<host>[^\]|]+)\]:(?P<port>\d+)[^|]*"
)

# gloo's guess at the cause, and its greeting: the group finds out the cause.
_GUESS = re.compile(r"\.?\s*(?:This is typically caused|GLHF).*", re.DOTALL)


def connection_lost(
    end: str, addresses: Mapping[int, bytes]
) -> ConnectionLostError | None:
    """Return the error if `end`, how a side process ended, says that a peer was lost.

    `addresses` is what each rank of the group published for the others to connect to.
    """
    said = _SAID.search(end)
    if said is None:
        return None
    text = _GUESS.sub("", said.group()).strip()
    peer = _peer_at(said["host"], int(said["port"]), addresses)
    return ConnectionLostError(f"gloo: {text}", peer=peer)


def _peer_at(host: str, port: int, addresses: Mapping[int, bytes]) -> int | None:
    """Return the rank whose published bytes hold the socket address, if one does.

    The layout of these bytes is gloo's own; a socket address lies in them as it is.
    """
    family, between = (socket.AF_INET6, 4) if ":" in host else (socket.AF_INET, 0)
    try:
        address = re.escape(socket.inet_pton(family, host))
    except OSError:
        return None  # a name
    # A sockaddr_in6 has 4 bytes of flow information between port and address. gloo
    # prints the port with its bytes in the order of the network or of the host.
    for order in ("=H", "!H"):
        port_bytes = re.escape(struct.pack(order, port))
        pattern = re.compile(port_bytes + b".{%d}" % between + address, re.DOTALL)
        found = [rank for rank, value in addresses.items() if pattern.search(value)]
        if len(found) == 1:
            return found[0]
    return None
