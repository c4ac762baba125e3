"""The store of a launcher, which outlives each rank: a rank can be replaced in it.

A world of ranks goes from round to round: the first begins with `init_process_group`,
the others with a rebuild. Every rank arrives in a round before it begins. A fresh
process of a rank arrives in the first round that no process of the rank has reached.
Each round has keys of its own, so that nothing of a dead process concerns a later one.
"""

from __future__ import annotations

import os
import time

from ..errors import DistBackendError, DistStoreTimeoutError
from ..launch_variables import STORE
from ..rank_sets import name_ranks
from ..stores.base import LAUNCHER, Store
from ..stores.prefix import PrefixStore
from .arrival import arrived

__all__ = [
    "ENDED",
    "LaunchedStore",
    "await_round",
    "is_launched",
    "join",
    "later_round",
    "note_begun",
]

#: The key that the launcher sets when a rank has ended well.
ENDED = "ended/{}"

_WORLDS = "worlds/{}"
#: Seconds between two looks for ranks that have ended.
_LOOK = 1.0

# Whether the world that this process has joined last began; ``None``: it joined none.
_has_begun: bool | None = None


class LaunchedStore(PrefixStore):
    """The keys of round `number` of a world, in the store `base` of the launcher."""

    def __init__(self, base: Store, world: int, number: int) -> None:
        super().__init__(f"world/{world}/{number}", base)
        self.world, self.number = world, number
        self._owns_store = True
        #: Whether every rank has arrived.
        self.complete = False

    def has_arrived(self, rank: int) -> bool:
        """Return whether a process of the rank has come to this round."""
        return arrived(self).check([str(rank)])

    def next(self) -> LaunchedStore:
        """Return the store of the next round."""
        return LaunchedStore(self.underlying_store, self.world, self.number + 1)

    def ended(self, ranks: list[int]) -> list[int]:
        """Return those of `ranks` whose processes have ended well."""
        base = self.underlying_store
        return [rank for rank in ranks if base.check([ENDED.format(rank)])]


def is_launched() -> bool:
    """Return whether the launcher of this rank serves a store.

    The ranks of a torchrun that such a rank has started have inherited the variable.
    """
    run = os.environ.get(STORE, "").partition("/")[2]
    return bool(run) and run == os.environ.get("TORCHELASTIC_RUN_ID")


def later_round(store: Store) -> LaunchedStore | None:
    """Return `store` where it is that of a later round than the first."""
    if isinstance(store, LaunchedStore) and store.number > 0:
        return store
    return None


def join(rank: int, size: int, timeout: float) -> LaunchedStore:
    """Return the store of the round that this process of `rank` arrives in."""
    from ..stores.tcp import TCPStore  # ZeroMQ takes 15 ms to import

    host, _, port = os.environ[STORE].partition("/")[0].rpartition(":")
    base = TCPStore(
        host,
        int(port),
        timeout=timeout,
        wait_for_workers=False,
        reports_deaths=True,
        server=LAUNCHER,
    )
    # A process may make a world after another, and tries one again that did not begin.
    # The fresh process of a rank goes on in that of the one before.
    global _has_begun
    replaces = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
    makes = not replaces if _has_begun is None else _has_begun
    _has_begun = False
    key = _WORLDS.format(rank)
    world = base.add(key, int(makes)) or base.add(key, 1)
    found = LaunchedStore(base, world, 0)
    if replaces and not makes and all(found.has_arrived(one) for one in range(size)):
        while found.has_arrived(rank):
            found = found.next()
    return found


def note_begun(store: Store) -> None:
    """Note that this process has its groups in `store`; the next world is another."""
    global _has_begun
    if isinstance(store, LaunchedStore):
        _has_begun = True


def await_round(store: LaunchedStore, rank: int, size: int, timeout: float) -> None:
    """Wait until every rank has arrived in a later round than the first.

    Raises `DistStoreTimeoutError` after `timeout` seconds, and `DistBackendError` once
    ranks that are waited for have ended; the culprits are the ranks that did not come.
    """
    here = arrived(store)
    here.set(str(rank), b"1")
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            here.wait([str(one) for one in range(size)], max(0.0, min(_LOOK, left)))
        except DistStoreTimeoutError as error:
            missing = [one for one in range(size) if not store.has_arrived(one)]
            ended = store.ended(missing)
            if ended:
                raise DistBackendError(
                    f"rank {rank} waits for all ranks to go on together, and "
                    f"{name_ranks(ended)} ended without an error: nobody can go on",
                    culprits=ended,
                ) from error
            if missing and left <= _LOOK:
                # Who comes now must not take this rank for one that waits.
                here.delete_key(str(rank))
                raise DistStoreTimeoutError(
                    f"rank {rank} waits for all ranks to go on together, and "
                    f"{name_ranks(missing)} did not come within {timeout:g} s: the "
                    "ranks that live call rankscope.torch.rebuild(), and the launcher "
                    "starts a dead one again, up to --max-restarts times",
                    culprits=missing,
                ) from error
        else:
            store.complete = True
            return
