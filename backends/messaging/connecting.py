"""MeetingConnector: how the ranks of a group exchange addresses through its store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from ..rank_sets import name_ranks
from ..stores.base import Store

__all__ = ["FOREVER", "MeetingConnector", "Namer"]

#: A wait that only an abort ends: the deadlines of ops are the group's.
FOREVER = 1e7

#: Returns what messages call ranks of the group, such as ``ranks 2, 5``.
Namer = Callable[[Iterable[int]], str]


class MeetingConnector:
    """The part of a `Connector` by which the ranks meet, and which an abort ends.

    Parameters
    ----------
    store : the keys of this meeting.
    rank, size : this rank in the group, and the group's size.
    name : what messages call ranks of the group.
    """

    def __init__(
        self, store: Store, rank: int, size: int, name: Namer = name_ranks
    ) -> None:
        self._store, self._name = store, name
        self._rank, self._size = rank, size
        #: Whether `cancel` was called: an error of the store is its consequence.
        self._cancelled = False

    def _gather(self, key: str, own: str) -> list[bytes]:
        """Return what every rank has given under `key`, by rank; block until all have.

        Raises `DistError`, also after `cancel`.
        """
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], own)
        return self._store.multi_get(keys, FOREVER)

    def cancel(self) -> None:
        """End `connect` from another thread; returns at once."""
        self._cancelled = True
        # On a thread: the store may be in use, and this may be a signal handler.
        threading.Thread(
            target=self._store.close, name="rankscope-cancel", daemon=True
        ).start()
