"""Arrival: the ranks meet in the store before one of them makes the default group.

A rank that is missing is then named by `init_process_group`, and not by the first op,
which knows only that it does not end.
"""

from __future__ import annotations

from ..errors import DistStoreTimeoutError
from ..rank_sets import name_ranks
from ..stores.base import Store
from ..stores.prefix import PrefixStore

__all__ = ["await_ranks", "enter", "leave"]

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


def await_ranks(store: Store, rank: int, world_size: int, timeout: float) -> None:
    """Wait until every rank has called this function over `store`.

    Raises `DistStoreTimeoutError`, whose culprits are the ranks that did not come
    within `timeout` seconds.
    """
    arrived = PrefixStore("arrived", store)
    arrived.set(str(rank), b"1")
    try:
        arrived.wait([str(one) for one in range(world_size)], timeout)
    except DistStoreTimeoutError as error:
        missing = [one for one in range(world_size) if not arrived.check([str(one)])]
        if not missing:
            return
        # Who comes now must not take this rank for one that waits.
        arrived.delete_key(str(rank))
        raise DistStoreTimeoutError(
            f"init_process_group on rank {rank}: {name_ranks(missing)} of {world_size} "
            f"did not come within {timeout:g} s: did every rank start, with its own "
            "RANK and the same WORLD_SIZE, and call init_process_group()? With "
            "wait_for_workers=False it returns without the others",
            culprits=missing,
        ) from error
