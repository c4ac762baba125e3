"""Connecting the ranks of a group over UCC, which meet through the store."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

from ..errors import DistBackendError, DistError
from ..messaging.connecting import MeetingConnector, Namer
from ..stores.base import Store
from ..ucx.settings import network_settings, own_loopback
from . import abandoned
from .context import Context
from .library import UCCError, load
from .transport import UCCTransport

__all__ = ["UCCConnector"]

# Seconds that a rank waits for the others to free a context of an aborted group.
_PATIENCE = 30.0


class UCCConnector(MeetingConnector):
    """Makes the transport of a group once all its members are there.

    Parameters
    ----------
    compares : whether this rank compares its calls with those of the others.
    store, rank, size, name : see `MeetingConnector`.
    """

    def __init__(
        self, compares: bool, store: Store, rank: int, size: int, name: Namer
    ) -> None:
        super().__init__(store, rank, size, name)
        self._compares = compares

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
            # First of all: UCC's wait for the other ranks cannot be cancelled.
            given = self._gather("ranks", json.dumps(own).encode())
            members = [json.loads(one) for one in given]
            _check_alike([one["compares"] for one in members], self._name)
            name = members[0]["name"]
            settings = network_settings([one["loopback"] for one in members])
            context = Context(
                library, self._gather, self._rank, self._size, name, settings
            )
            common = set.intersection(*({*one["abandoned"]} for one in members))
        except UCCError as error:
            raise DistBackendError(
                f"UCC {library.version} cannot be used on {self._name([self._rank])}: "
                f"{error}"
            ) from error
        except DistError:
            if self._cancelled:
                return None
            raise
        finally:
            abandoned.free_later(claimed, common, self._gather_for_a_while)
        return UCCTransport(context, self._rank)

    def _gather_for_a_while(self, key: str, own: bytes) -> Sequence[bytes]:
        return self._gather(key, own, _PATIENCE)


def _check_alike(compares: Sequence[bool], name: Namer) -> None:
    """Raise `DistBackendError` if some ranks (by rank) compare, and some do not."""
    without = [rank for rank, does in enumerate(compares) if not does]
    if without and len(without) < len(compares):
        raise DistBackendError(
            f"RANKSCOPE_UCC_CHECK=0 is set on {name(without)} alone; set it on "
            "every rank, or on none"
        )
