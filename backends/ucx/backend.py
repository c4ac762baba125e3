"""The UCX backend: collectives over UCX's tagged messages.

UCX moves the bytes inside this process: through shared memory and reads of the other
process's memory on one host, over TCP between hosts. Only the arithmetic and the order
of the messages are Rankscope's.
"""

from __future__ import annotations

from ..interface.base import Backend
from ..messaging.backend import MessagingBackend
from ..rank_sets import name_ranks
from ..stores.base import Store
from .connector import UCXConnector
from .info import note
from .library import load, unavailable_reason

__all__ = ["UCXBackend"]


class UCXBackend(MessagingBackend):
    """One group over UCX, on this rank."""

    name = "ucx"
    interface_version = 1

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._ucx = UCXConnector(store, rank, size)
        super().__init__(rank, size, self._ucx)
        note(self)

    def transports(self) -> dict[int, str]:
        """Return the transports by rank of the group, of those that were sent to."""
        transport = self._ucx.transport
        return {} if transport is None else transport.transports()

    def state(self) -> str:
        """Return the transports and the ranks that are reached over them."""
        by_transport: dict[str, list[int]] = {}
        for peer, names in sorted(self.transports().items()):
            by_transport.setdefault(names, []).append(peer)
        return "; ".join(
            f"{names} to {name_ranks(peers)}" for names, peers in by_transport.items()
        )


def _create(store: Store, rank: int, size: int, timeout: float) -> UCXBackend:
    load()  # its error is that of the group's first use, and not of a thread
    return UCXBackend(store, rank, size)


Backend.register_backend("ucx", _create, devices="cpu", unavailable=unavailable_reason)
