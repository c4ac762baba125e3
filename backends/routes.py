"""The address of this host on its route to another one."""

from __future__ import annotations

import socket
from ipaddress import IPv6Address

__all__ = ["address_towards", "is_link_local"]


def address_towards(host: str, family: int = socket.AF_INET) -> str:
    """Return the local address from which this host sends to `host`.

    Raises `OSError` where no route leads there, or nobody knows the name.
    """
    family, kind, _, _, peer = socket.getaddrinfo(
        host, 9, family, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing: it picks the route.
        probe.connect(peer)
        return str(probe.getsockname()[0])


def is_link_local(host: str) -> bool:
    """Return whether `host` is an IPv6 address that holds for one interface alone.

    Other hosts cannot use it, ``fe80::1%eth0``, as they name their interfaces.
    """
    try:
        return IPv6Address(host).is_link_local
    except ValueError:
        return False
