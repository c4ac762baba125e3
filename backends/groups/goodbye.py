"""Leaving the store of all ranks in good order: its host, rank 0, leaves last."""

from __future__ import annotations

import logging

from ..errors import DistError
from ..stores.base import Store
from ..stores.prefix import PrefixStore

__all__ = ["enter", "say_goodbye"]

_log = logging.getLogger(__name__)

# Seconds that rank 0 waits until the others have left the store.
_TIMEOUT = 5.0


def enter(store: Store) -> None:
    """Have the store count this process as gone when it dies: nobody waits for it."""
    PrefixStore("goodbye", store).last_will("gone/+", b"1")


def say_goodbye(store: Store, rank: int, size: int, *, wait: bool = True) -> None:
    """Withdraw the death notices of this rank; on rank 0 wait for the others.

    `wait` is whether rank 0 waits. `store` remains to be closed.
    """
    goodbye = PrefixStore("goodbye", store)
    try:
        store.withdraw()
        goodbye.set(f"gone/{goodbye.add('gone', 1)}", b"1")
        if rank == 0 and wait:
            goodbye.wait([f"gone/{size}"], timeout=_TIMEOUT)
    except DistError as error:
        # The host has ended, or another rank died: there is nothing left to do.
        _log.debug("no goodbye: %s", error)
