"""How the ranks of a group find each other: through its store, and at which address."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence

import psutil

from ..errors import DistBackendError
from ..rank_sets import name_ranks
from ..routes import address_towards, any_address, is_link_local
from ..stores.base import Store
from ..stores.prefix import without_prefixes
from ..stores.tcp import TCPStore
from ..thread_start import start_thread

__all__ = [
    "FOREVER",
    "MeetingConnector",
    "Namer",
    "different",
    "interface_of",
    "own_address",
]

#: A wait that only an abort ends: the deadlines of ops are the group's.
FOREVER = 1e7

#: Returns what messages call ranks of the group, such as ``ranks 2, 5``.
Namer = Callable[[Iterable[int]], str]

# The preferred one first.
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class MeetingConnector:
    """The part of a `Connector` by which the ranks meet, and which an abort ends."""

    def __init__(
        self, store: Store, rank: int, size: int, name: Namer = name_ranks
    ) -> None:
        self._store, self._name = store, name
        self._rank, self._size = rank, size
        #: Whether `cancel` was called: an error of the store is its consequence.
        self._cancelled = False

    def _gather(self, key: str, own: str) -> list[bytes]:
        """Return what every rank has given under `key`; block until all have."""
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], own)
        return self._store.multi_get(keys, FOREVER)

    def cancel(self) -> None:
        """End `connect` from another thread; returns at once."""
        self._cancelled = True
        # On a thread: the store may be in use, and this may be a signal handler.
        start_thread("cancel", self._end)

    def _end(self) -> None:
        self._store.close()


def different(found: Sequence[str], what: str, name: Namer) -> str:
    """Return the sentence that the ranks use different `what`: `found`, by rank."""
    users = [
        f"{name(rank for rank, one in enumerate(found) if one == each)}: {each}"
        for each in sorted({*found})
    ]
    return (
        f"the ranks of the group use different {what}: {'; '.join(users)}. Install the "
        "same one for all"
    )


def own_address(store: Store | None = None, host: str = "") -> str:
    """Return the address at which ranks on other hosts reach this process.

    It is that of the interface GLOO_SOCKET_IFNAME, else of the route to `host`, to that
    of `store`, to MASTER_ADDR, or to the rest of the world, else any that is not
    loopback.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        found = psutil.net_if_addrs().get(interface, [])
        usable = [
            one
            for one in found
            if one.family in _FAMILIES and not is_link_local(one.address)
        ]
        if usable:
            return min(usable, key=lambda one: _FAMILIES.index(one.family)).address
        raise DistBackendError(
            f"GLOO_SOCKET_IFNAME names {interface!r}, which has no address here "
            "that others reach; "
            f"there are {', '.join(sorted(psutil.net_if_addrs()))}"
        )
    return (
        _address_towards(host, _host_of(store), os.environ.get("MASTER_ADDR", ""))
        or any_address()
    )


def _host_of(store: Store | None) -> str:
    """Return the host at which the ranks reach `store`; empty if it has none."""
    found = None if store is None else without_prefixes(store)
    return found.host if isinstance(found, TCPStore) else ""


def interface_of(address: str) -> str:
    """Return the name of the interface that has `address`; empty if none has it."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return interface
    return ""


def _address_towards(*hosts: str) -> str | None:
    """Return the local address of the first route that leaves this machine."""
    # A documentation address stands for "anywhere else".
    for target in (*filter(None, hosts), "192.0.2.1"):
        try:
            address = address_towards(target, socket.AF_UNSPEC)
        except OSError:
            continue
        if address != "::1" and not address.startswith("127."):
            return address
    return None
