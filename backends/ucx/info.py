"""Which UCX this process uses, and how its groups are connected."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

from .library import load
from .settings import network_settings, own_settings

__all__ = ["UCXInfo", "note", "ucx_info"]


class Connected(Protocol):
    """A group over UCX; see `UCXBackend`."""

    #: ``group 'default' on rank 2``.
    place: str

    def connections(self) -> dict[int, str]:
        """Return the transports by global rank."""


_groups: weakref.WeakSet[Connected] = weakref.WeakSet()
_lock = threading.Lock()


def note(group: Connected) -> None:
    """Have `ucx_info` list `group` for as long as it exists."""
    with _lock:
        _groups.add(group)


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
