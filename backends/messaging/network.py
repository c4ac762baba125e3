"""The address and network interface at which this host is reached."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil

from ..errors import DistBackendError
from ..stores.base import Store
from ..stores.prefix import PrefixStore
from ..stores.tcp import TCPStore

__all__ = ["interface_of", "own_address"]

# The preferred one first.
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def own_address(store: Store | None = None) -> str:
    """Return the address at which ranks on other hosts reach this process.

    It is that of the interface GLOO_SOCKET_IFNAME, else of the route to the host of
    `store`, to MASTER_ADDR, or to the rest of the world, else loopback. Raises
    `DistBackendError` if the variable names an interface that has no address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        found = psutil.net_if_addrs().get(interface, [])
        usable = [one for one in found if one.family in _FAMILIES]
        if usable:
            return min(usable, key=_preference).address
        raise DistBackendError(
            f"GLOO_SOCKET_IFNAME names {interface!r}, which has no address here; "
            f"there are {', '.join(sorted(psutil.net_if_addrs()))}"
        )
    return (
        _address_towards(_host_of(store), os.environ.get("MASTER_ADDR", ""))
        or "127.0.0.1"
    )


def _host_of(store: Store | None) -> str:
    """Return the host at which the ranks reach `store`; empty if it has none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else ""


def _preference(found: Any) -> tuple[bool, int]:
    # A link-local address, fe80::1%eth0, has no meaning on another host.
    return "%" in found.address, _FAMILIES.index(found.family)


def interface_of(address: str) -> str:
    """Return the name of the interface that has `address`; empty if none has it."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return interface
    return ""


def _address_towards(*hosts: str) -> str | None:
    """Return the local address of the first route that leaves this machine."""
    # Connecting a datagram socket sends nothing. A documentation address stands
    # for "anywhere else".
    for target in (*filter(None, hosts), "192.0.2.1"):
        try:
            family, kind, _, _, peer = socket.getaddrinfo(
                target, 9, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(peer)
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if address != "::1" and not address.startswith("127."):
            return address
    return None
