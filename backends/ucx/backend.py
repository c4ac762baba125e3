"""The UCX backend: collectives over UCX's tagged messages.

UCX moves the bytes inside this process: through shared memory and reads of the other
process's memory on one host, over TCP between hosts. Only the arithmetic and the order
of the messages are Rankscope's.
"""

from __future__ import annotations

from ..interface.base import Backend
from ..messaging.backend import MessagingBackend
from ..stores.base import Store
from .connector import UCXConnector
from .info import note
from .library import load, unavailable_reason
from .transport_kinds import kinds

__all__ = ["UCXBackend"]


class UCXBackend(MessagingBackend):
    """One group over UCX, on this rank."""

    name = "ucx"
    interface_version = 1

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._ucx = UCXConnector(store, rank, size, self._name)
        super().__init__(rank, size, self._ucx, signs=True)
        note(self)

    def transports(self) -> dict[int, tuple[str, ...]]:
        """Return the kinds of transports to each rank that was sent to."""
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


def _create(store: Store, rank: int, size: int, timeout: float) -> UCXBackend:
    load()  # its error is that of the group's first use, and not of a thread
    return UCXBackend(store, rank, size)


Backend.register_backend("ucx", _create, devices="cpu", unavailable=unavailable_reason)
