"""The tcp backend: host arrays over plain sockets and the memory of other ranks."""

from __future__ import annotations

from ..interface.base import Backend
from ..messaging.backend import MessagingBackend
from ..messaging.signature import BITS
from ..stores.base import Store
from .connector import TCPConnector

__all__ = ["TCPBackend"]


class TCPBackend(MessagingBackend):
    """One group over sockets, on this rank."""

    name = "tcp"
    interface_version = 1

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._tcp = TCPConnector(store, rank, size, self._name)
        super().__init__(rank, size, self._tcp, bits=BITS)

    def transports(self) -> dict[int, tuple[str, ...]]:
        transport = self._tcp.transport
        return {} if transport is None else transport.kinds()


def _create(store: Store, rank: int, size: int, timeout: float) -> TCPBackend:
    return TCPBackend(store, rank, size)


Backend.register_backend("tcp", _create, devices="cpu")
