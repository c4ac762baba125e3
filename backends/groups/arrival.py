"""Arrival and goodbye: how the ranks meet in the store, and how they leave it.

All ranks arrive before one of them makes the default group: `init_process_group` then
names a missing rank, which the first op could not: it knows only that it does not end.
Rank 0 leaves last, where it serves the store.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta

from ..errors import DistError, DistStoreTimeoutError
from ..rank_sets import name_ranks
from ..slurm_step import meeting_step
from ..stores.base import OTHER_KEY, OTHER_KEY_HINT, RANK_0, Store, remaining
from ..stores.prefix import PrefixStore, without_prefixes
from ..thread_start import run_bounded
from .row import PATIENCE

__all__ = [
    "announce_death",
    "announce_end",
    "arrived",
    "await_ranks",
    "enter",
    "forget",
    "has_left",
    "hurry",
    "leave",
    "say_goodbye",
]

_log = logging.getLogger(__name__)

# Seconds that rank 0 waits until the others have left the store, or read from it, and
# these for rank 0, which may be stopped, to take note of it.
_GOODBYE = 5.0
# Seconds between two looks whether a process of the step was refused.
_LOOK = 4.0
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


def forget(store: Store, size: int) -> None:
    """Drop the keys that `enter` has given, once all ranks have destroyed the group."""
    if not isinstance(store, PrefixStore) or not store.prefix.startswith(f"{_COUNT}/"):
        return  # the keys are the user's

    def clear() -> None:
        try:
            if store.add("destroyed", 1) == size:
                store.clear()
        except DistError as error:
            _log.debug("the keys of the default group stay: %s", error)

    run_bounded("forget-default", clear, PATIENCE)


def arrived(store: Store) -> Store:
    """Return the keys of the ranks that have come: their numbers."""
    return PrefixStore("arrived", store)


def await_ranks(
    store: Store, rank: int, world_size: int, timeout: float, otherwise: str = ""
) -> None:
    """Wait until every rank has called this function over `store`."""
    here, me = arrived(store), f"{platform.node()}:{os.getpid()}"
    mine = f"{world_size} {me}"
    before = here.compare_set(str(rank), "", mine).decode()
    if before != mine:
        # Of this process, which tries again, or of another one of this rank.
        _, other, *_ = before.split()
        if other != me and here.check([str(one) for one in range(world_size)]):
            if has_left(store, rank, 0):
                raise DistError(
                    f"init_process_group: rank {rank} was process {other}, which has "
                    f"left the groups of the others: {me} cannot take its place. End "
                    "the others, and start all ranks again; python -m rankscope.run "
                    "--max-restarts 3 lets a rank that failed be started again alone"
                )
            # Its end would be taken for that of the rank, and end the groups.
            raise DistError(
                f"init_process_group: all ranks have come, and rank {rank} is process "
                f"{other}: {me} cannot be it, too. Leave the call to the rank, below "
                "\"if __name__ == '__main__':\" where it starts processes by spawn, or "
                "give them a MASTER_PORT and ranks of their own"
            )
        here.set(str(rank), mine if other == me else f"{mine} {other}")
    began = time.monotonic()
    try:
        _wait(here, [str(one) for one in range(world_size)], timeout)
    except DistStoreTimeoutError:
        found = {one: _read(here, str(one)) for one in range(world_size)}
        came = {one: value for one, value in found.items() if value}
        missing = [one for one in found if one not in came]
        if not missing:
            return
        left = [one for one in missing if here.check([f"{one}/left"])]
        culprits = [one for one in missing if one not in left] or missing
        odd = "".join(_oddities(came, world_size))
        if _has_refused(here):
            odd += f"the store has {OTHER_KEY_HINT}; "
        waited = min(timeout, time.monotonic() - began)
        here.set(f"{rank}/left", "")
        # Who comes now must not take this rank for one that waits.
        here.delete_key(str(rank))
        if rank == 0 and store.server == RANK_0:
            # One of another size has ended its wait, and knows why.
            alike = [one for one, value in came.items() if _size(value) == world_size]
            _await_readers(here, [one for one in alike if one])
        raise DistStoreTimeoutError(
            f"init_process_group on rank {rank}: {name_ranks(culprits)} of "
            f"{world_size} did not come within {waited:.3g} s: {odd}did every rank "
            "start, with its own RANK and the same WORLD_SIZE, and call "
            f"init_process_group()?{otherwise}",
            culprits=culprits,
        ) from None  # the store misses the keys of ranks that gave up, too
    first = _read(here, "0")
    if first and _size(first) != world_size:
        raise ValueError(
            f"init_process_group on rank {rank}: its world_size is {world_size}, that "
            f"of rank 0 is {_size(first)}; expected the same on every rank (WORLD_SIZE)"
        )


def _wait(here: Store, keys: Sequence[str], timeout: float) -> None:
    """Wait for `keys`; in a step of Slurm less long once a process was refused.

    Its ranks have no secret in common without a home that they share, and srun ends
    none where others have failed. Elsewhere whoever was refused may be a stranger.
    """
    deadline, refused = time.monotonic() + timeout, False
    while True:
        left = remaining(deadline)
        try:
            here.wait(keys, min(left, _LOOK) if meeting_step() else left)
            return
        except DistStoreTimeoutError:
            # Others that come late are awaited a while, and told why.
            if refused or not remaining(deadline):
                raise
            refused = bool(meeting_step()) and _has_refused(here)


def _has_refused(store: Store) -> bool:
    """Return whether the store has refused a process with another key."""
    return without_prefixes(store).check([OTHER_KEY])


def _await_readers(here: Store, came: Collection[int]) -> None:
    """Let the ranks that `came` learn who is missing: the store ends with rank 0."""
    until = time.monotonic() + _GOODBYE
    while time.monotonic() < until and any(here.check([str(one)]) for one in came):
        time.sleep(0.02)


def _read(here: Store, key: str) -> str:
    """Return the value of a key, empty if it has none."""
    try:
        return here.get(key, timeout=0).decode()
    except DistStoreTimeoutError:
        return ""


def _size(value: str) -> int:
    """Return the world size of a rank that has come."""
    return int(value.split()[0])


def _oddities(came: Mapping[int, str], world_size: int) -> Iterator[str]:
    """Yield what may explain that ranks are missing, each with a semicolon."""
    for rank, value in came.items():
        _, process, *other = value.split()
        if _size(value) != world_size:
            yield f"rank {rank} came with world_size {_size(value)}; "
        for one in other:
            yield f"two processes came as rank {rank}, {one} and {process}; "


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


def has_left(store: Store, *ranks: int) -> bool:
    """Return whether one of `ranks` has left `store`: nothing new begins in it."""
    goodbye = PrefixStore("goodbye", store)
    return any(goodbye.check([_gone(one)]) for one in {*ranks})


def hurry(store: Store) -> None:
    """Have calls of a process that is to end not wait for long."""
    store.timeout = min(store.timeout, timedelta(seconds=_GOODBYE))


def say_goodbye(store: Store, rank: int, size: int, *, wait: bool = True) -> None:
    """Withdraw the death notices of this rank; on rank 0 wait for the others."""
    hurry(store)
    goodbye = PrefixStore("goodbye", store)
    try:
        store.withdraw()
        goodbye.set(_gone(rank), b"1")
        if rank == 0 and wait and store.server == RANK_0:
            goodbye.wait([_gone(one) for one in range(size)], timeout=_GOODBYE)
    except DistError as error:
        # The host has ended, or another rank died: there is nothing left to do.
        _log.debug("no goodbye: %s", error)
