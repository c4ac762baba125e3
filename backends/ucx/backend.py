"""The UCX backend: collectives over UCX's tagged messages."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from ..descriptors import REMEDY, allow_descriptors
from ..errors import DistBackendError, DistError
from ..interface.base import Backend
from ..messaging.backend import MessagingBackend
from ..messaging.connecting import MeetingConnector, Namer, different
from ..stores.base import Store
from .library import UCXError, load, unavailable_reason
from .settings import chosen, network_settings, own_loopback, own_settings
from .transport import BITS, UCXTransport
from .worker import Worker

__all__ = ["UCXBackend", "UCXConnector", "UCXInfo", "kinds", "ucx_info"]

# Kind → the transports it stands for. Of what is not here the part before the first
# underscore is the kind: rc_verbs and rc_mlx5 are "rc".
_MEMBERS = {"shm": ("sysv", "posix", "xpmem"), "cma": ("cma",), "knem": ("knem",)}
_KINDS = {member: kind for kind, members in _MEMBERS.items() for member in members}
_PLACES = {kind: place for place, kind in enumerate(_MEMBERS)}

#: File descriptors that a group may need, which opens some for each transport.
_DESCRIPTORS = 40

# The groups that `ucx_info` lists.
_groups: weakref.WeakSet[UCXBackend] = weakref.WeakSet()
_lock = threading.Lock()


class UCXConnector(MeetingConnector):
    """Makes the transport of a group once all its members are there."""

    #: What `connect` has returned.
    transport: UCXTransport | None = None

    def connect(self) -> UCXTransport | None:
        """Return the transport, or ``None`` after `cancel`."""
        version = load().version
        network_settings()  # its error is raised before this rank waits for others
        try:
            own = {"version": version, "loopback": own_loopback()}
            given = self._gather("rank", json.dumps(own))
            members = [json.loads(one) for one in given]
            _check_versions([member["version"] for member in members], self._name)
            settings = network_settings([member["loopback"] for member in members])
            worker = self._make_worker(version, settings)
            try:
                addresses = self._gather("address", worker.address.hex())
                worker.connect([bytes.fromhex(one.decode()) for one in addresses])
            except BaseException:
                worker.destroy()
                raise
        except DistError:
            if self._cancelled:
                return None
            raise
        if self._cancelled:
            worker.destroy()
            return None
        self.transport = UCXTransport(worker, self._rank, self._name)
        return self.transport

    def _make_worker(self, version: str, settings: dict[str, str]) -> Worker:
        allow_descriptors(_DESCRIPTORS)
        try:
            return Worker(self._size, settings)
        except UCXError as error:
            why = f"{error}{chosen()}"
            if not allow_descriptors(_DESCRIPTORS):
                # UCX says "Input/output error".
                why = f"no file descriptors are left ({error}): {REMEDY}"
            raise DistBackendError(
                f"UCX {version} cannot be used on {self._name([self._rank])}: {why}"
            ) from error


def _check_versions(versions: list[str], name: Namer) -> None:
    """Raise `DistBackendError` if the ranks (by rank) have different major versions."""
    if len({version.partition(".")[0] for version in versions}) > 1:
        raise DistBackendError(different(versions, "versions of UCX", name))


class UCXBackend(MessagingBackend):
    """One group over UCX, on this rank."""

    name = "ucx"
    interface_version = 1

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._ucx = UCXConnector(store, rank, size, self._name)
        super().__init__(rank, size, self._ucx, bits=BITS)
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
    """Return the kinds of transports ``("cma", "sysv", "tcp on eth0")``, sorted."""
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
    network = {f"UCX_{name}": value for name, value in network_settings().items()}
    with _lock:
        groups = sorted(_groups, key=lambda group: group.place)
    # One that was aborted, and may still be there, has the place of its successor.
    connections = [(group.place, group.connections()) for group in groups]
    return UCXInfo(
        library.version,
        str(library.path),
        {**own_settings(), **network},
        {group: peers for group, peers in connections if peers},
    )


def _create(store: Store, rank: int, size: int, timeout: float) -> UCXBackend:
    load()  # its error is that of the group's first use, and not of a thread
    return UCXBackend(store, rank, size)


Backend.register_backend("ucx", _create, devices="cpu", unavailable=unavailable_reason)
