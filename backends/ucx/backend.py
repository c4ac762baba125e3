"""The UCX backend: collectives over UCX's tagged messages.

UCX moves the bytes inside this process: through shared memory and reads of the other
process's memory on one host, over TCP between hosts. Only the arithmetic and the order
of the messages are Rankscope's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from ..interface.base import Backend
from ..messaging.backend import MessagingBackend
from ..stores.base import Store
from .connector import UCXConnector
from .library import load, unavailable_reason
from .settings import network_settings, own_settings

__all__ = ["UCXBackend", "UCXInfo", "kinds", "ucx_info"]

# Kind → the transports it stands for. Of what is not here the part before the first
# underscore is the kind: rc_verbs and rc_mlx5 are "rc".
_MEMBERS = {"shm": ("sysv", "posix", "xpmem"), "cma": ("cma",), "knem": ("knem",)}
_KINDS = {member: kind for kind, members in _MEMBERS.items() for member in members}
_PLACES = {kind: place for place, kind in enumerate(_MEMBERS)}

# The groups that `ucx_info` lists.
_groups: weakref.WeakSet[UCXBackend] = weakref.WeakSet()
_lock = threading.Lock()


class UCXBackend(MessagingBackend):
    """One group over UCX, on this rank."""

    name = "ucx"
    interface_version = 1

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._ucx = UCXConnector(store, rank, size, self._name)
        super().__init__(rank, size, self._ucx, signs=True)
        with _lock:
            _groups.add(self)

    def transports(self) -> dict[int, tuple[str, ...]]:
        transport = self._ucx.transport
        found = {} if transport is None else transport.recent_transports()
        return {peer: kinds(names) for peer, names in found.items()}

    def connections(self) -> dict[int, str]:
        """Return UCX's transports to each global rank that was sent to, and devices."""
        transport = self._ucx.transport
        found = {} if transport is None else transport.transports()
        return {
            self.global_ranks[peer]: ", ".join(names)
            for peer, names in sorted(found.items())
        }


def kinds(names: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of transports ``("cma", "sysv", "tcp on eth0")``, sorted.

    Those within a host are first: ``("shm", "cma", "tcp")``.
    """
    found = set()
    for name in names:
        transport, _, _ = name.partition(" on ")
        found.add(_KINDS.get(transport, transport.partition("_")[0]))
    return tuple(
        sorted(found, key=lambda kind: (_PLACES.get(kind, len(_PLACES)), kind))
    )


@dataclass(frozen=True)
class UCXInfo:
    """Which UCX this process uses, and how; made by `ucx_info`.

    Parameters
    ----------
    version : str
        The version of the library.
    path : str
        The folder of its files.
    settings : dict of str to str
        What chooses its transports: variables such as UCX_TLS that are set, and the
        interface that GLOO_SOCKET_IFNAME names, as UCX_NET_DEVICES.
    connections : dict of str to dict of int to str
        For each group the transports to its ranks, by global rank, and the network
        interface:
        ``{"group 'default' on rank 0": {1: "sysv, cma", 2: "tcp on eth0"}}``.

    Examples
    --------
    >>> isinstance(dist.ucx_info(), dist.UCXInfo)
    True
    """

    version: str
    path: str
    settings: dict[str, str]
    connections: dict[str, dict[int, str]]

    def __str__(self) -> str:
        lines = [f"UCX {self.version} in {self.path}"]
        lines += [f"    {name}={value}" for name, value in self.settings.items()]
        for group, peers in self.connections.items():
            lines.append(f"    {group}")
            lines += [f"        to rank {peer}: {over}" for peer, over in peers.items()]
        return "\n".join(lines)


def ucx_info() -> UCXInfo:
    """Return which UCX this process uses, and its transports to each rank.

    Returns
    -------
    UCXInfo
        A rank of a group is in its `connections` once this one has sent to it.

    Raises
    ------
    DistBackendError
        UCX cannot be used here; the error has the remedy.

    Examples
    --------
    >>> print(dist.ucx_info().version)
    1.22.0
    """
    library = load()
    chosen = {f"UCX_{name}": value for name, value in network_settings().items()}
    with _lock:
        groups = sorted(_groups, key=lambda group: group.place)
    # One that was aborted, and may still be there, has the place of its successor.
    connections = [(group.place, group.connections()) for group in groups]
    return UCXInfo(
        library.version,
        str(library.path),
        {**own_settings(), **chosen},
        {group: peers for group, peers in connections if peers},
    )


def _create(store: Store, rank: int, size: int, timeout: float) -> UCXBackend:
    load()  # its error is that of the group's first use, and not of a thread
    return UCXBackend(store, rank, size)


Backend.register_backend("ucx", _create, devices="cpu", unavailable=unavailable_reason)
