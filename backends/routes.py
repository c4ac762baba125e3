"""The address of this host on its route to another one."""

from __future__ import annotations

import socket
from ipaddress import IPv6Address, ip_address

import psutil

__all__ = ["address_towards", "any_address", "is_link_local"]


def address_towards(host: str, family: int = socket.AF_INET) -> str:
    """Return the local address from which this host sends to `host`."""
    family, kind, _, _, peer = socket.getaddrinfo(
        host, 9, family, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing: it picks the route.
        probe.connect(peer)
        return str(probe.getsockname()[0])


def is_link_local(host: str) -> bool:
    """Return whether `host` is an IPv6 address that holds for one interface alone."""
    try:
        return IPv6Address(host).is_link_local
    except ValueError:
        return False


def any_address() -> str:
    """Return an address of this host that others may reach, of IPv4 if it has one."""
    found = [
        (one.family != socket.AF_INET, one.address)
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6)
        and not is_link_local(one.address)
        and not ip_address(one.address).is_loopback
    ]
    # The first of its family, as the system lists the interfaces.
    return min(found, key=lambda one: one[0], default=(False, "127.0.0.1"))[1]
