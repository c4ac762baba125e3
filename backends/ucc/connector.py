"""Connecting the ranks of a group over UCC, which meet through the store."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Sequence

from ..errors import DistBackendError, DistError
from ..rank_sets import name_ranks
from ..stores.base import Store
from ..ucx.settings import network_settings, own_loopback
from . import abandoned
from .context import Context
from .library import UCCError, load
from .transport import UCCTransport

__all__ = ["UCCConnector"]

# A wait that only an abort ends: the deadlines of ops are the group's.
_FOREVER = 1e7

# Seconds that a rank waits for the others to free a context of an aborted group.
_PATIENCE = 30.0


class UCCConnector:
    """Makes the transport of a group once all its members are there.

    Parameters
    ----------
    compares : whether this rank compares its calls with those of the others.
    """

    def __init__(self, store: Store, rank: int, size: int, compares: bool) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._compares = compares
        self._cancelled = False

    def connect(self) -> UCCTransport | None:
        """Return the transport, or ``None`` after `cancel`.

        Raises `DistError` if UCC or the store fails, or if the ranks do not all compare
        their calls. Blocks until every rank is there.
        """
        library = load()
        network_settings()  # its error is raised before this rank waits for others
        claimed = abandoned.claim(self._size)
        common: set[str] = set()
        try:
            own = {
                "compares": self._compares,
                "name": uuid.uuid4().hex,
                "loopback": own_loopback(),
                "abandoned": list(claimed),
            }
            # First of all: UCC would wait for the other ranks where nobody can cancel.
            given = self._gather("ranks", json.dumps(own).encode())
            members = [json.loads(one) for one in given]
            _check_alike([one["compares"] for one in members])
            name = members[0]["name"]
            settings = network_settings([one["loopback"] for one in members])
            context = Context(
                library, self._gather, self._rank, self._size, name, settings
            )
            common = set.intersection(*({*one["abandoned"]} for one in members))
        except UCCError as error:
            raise DistBackendError(
                f"UCC {library.version} cannot be used on rank {self._rank}: {error}"
            ) from error
        except DistError:
            if self._cancelled:
                return None
            raise
        finally:
            abandoned.free_later(claimed, common, self._gather_for_a_while)
        return UCCTransport(context, self._rank)

    def _gather(self, name: str, own: bytes) -> Sequence[bytes]:
        return self._gather_within(_FOREVER, name, own)

    def _gather_for_a_while(self, name: str, own: bytes) -> Sequence[bytes]:
        return self._gather_within(_PATIENCE, name, own)

    def _gather_within(self, timeout: float, name: str, own: bytes) -> list[bytes]:
        keys = [f"{name}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], own)
        return self._store.multi_get(keys, timeout)

    def cancel(self) -> None:
        """End `connect` from another thread; returns at once."""
        self._cancelled = True
        # On a thread: the store may be in use, and this may be a signal handler.
        threading.Thread(
            target=self._store.close, name="rankscope-ucc-cancel", daemon=True
        ).start()


def _check_alike(compares: Sequence[bool]) -> None:
    """Raise `DistBackendError` if some ranks (by rank) compare, and some do not."""
    without = [rank for rank, does in enumerate(compares) if not does]
    if without and len(without) < len(compares):
        raise DistBackendError(
            f"RANKSCOPE_UCC_CHECK=0 is set on {name_ranks(without)} alone; set it on "
            "every rank, or on none"
        )
