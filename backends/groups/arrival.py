"""Arrival and goodbye: how the ranks meet in the store, and how they leave it.

All ranks arrive before one of them makes the default group: `init_process_group` then
names a missing rank, which the first op could not: it knows only that it does not end.
Rank 0 leaves last, where it serves the store.
"""

from __future__ import annotations

import logging

from ..errors import DistError, DistStoreTimeoutError
from ..rank_sets import name_ranks
from ..stores.base import RANK_0, Store
from ..stores.prefix import PrefixStore

__all__ = [
    "announce_death",
    "announce_end",
    "arrived",
    "await_ranks",
    "enter",
    "leave",
    "say_goodbye",
]

_log = logging.getLogger(__name__)

# Seconds that rank 0 waits until the others have left the store.
_GOODBYE = 5.0
# How often a rank has begun to make its default group over the same store.
_COUNT = "init_process_group"


def enter(store: Store, rank: int) -> Store:
    """Return `store` with keys for the default group that `rank` makes now.

    Over one store a process may make a default group after another; what is left of
    the first one must not concern the second.
    """
    return PrefixStore(f"{_COUNT}/{store.add(f'{_COUNT}/{rank}', 1)}", store)


def leave(store: Store, rank: int) -> None:
    """Take back `enter`: the group was not made, and the rank may try once more."""
    store.add(f"{_COUNT}/{rank}", -1)


def arrived(store: Store) -> Store:
    """Return the keys of the ranks that have come: their numbers."""
    return PrefixStore("arrived", store)


def await_ranks(store: Store, rank: int, world_size: int, timeout: float) -> None:
    """Wait until every rank has called this function over `store`.

    Raises `DistStoreTimeoutError`, whose culprits are the ranks that did not come
    within `timeout` seconds.
    """
    here = arrived(store)
    here.set(str(rank), b"1")
    try:
        here.wait([str(one) for one in range(world_size)], timeout)
    except DistStoreTimeoutError as error:
        missing = [one for one in range(world_size) if not here.check([str(one)])]
        if not missing:
            return
        # Who comes now must not take this rank for one that waits.
        here.delete_key(str(rank))
        raise DistStoreTimeoutError(
            f"init_process_group on rank {rank}: {name_ranks(missing)} of {world_size} "
            f"did not come within {timeout:g} s: did every rank start, with its own "
            "RANK and the same WORLD_SIZE, and call init_process_group()? With "
            "wait_for_workers=False it returns without the others",
            culprits=missing,
        ) from error


def announce_death(store: Store, rank: int) -> None:
    """Have the store count this rank as gone when it dies: none waits for it."""
    PrefixStore("goodbye", store).last_will(_gone(rank), b"1")


def announce_end(store: Store, rank: int) -> None:
    """Count this rank as gone: its program has ended, and its process will later."""
    try:
        PrefixStore("goodbye", store).set(_gone(rank), b"1")
    except DistError as error:
        # The host has ended: it waits for nobody.
        _log.debug("no goodbye: %s", error)


def _gone(rank: int) -> str:
    return f"gone/{rank}"


def say_goodbye(store: Store, rank: int, size: int, *, wait: bool = True) -> None:
    """Withdraw the death notices of this rank; on rank 0 wait for the others.

    `wait` is whether rank 0 waits. `store` remains to be closed.
    """
    goodbye = PrefixStore("goodbye", store)
    try:
        store.withdraw()
        goodbye.set(_gone(rank), b"1")
        if rank == 0 and wait and store.server == RANK_0:
            goodbye.wait([_gone(one) for one in range(size)], timeout=_GOODBYE)
    except DistError as error:
        # The host has ended, or another rank died: there is nothing left to do.
        _log.debug("no goodbye: %s", error)
