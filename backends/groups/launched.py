"""The store of a launcher, which outlives each rank: a rank can be replaced in it.

The ranks go from round to round: each begins with `init_process_group`, or with a
rebuild. Every rank arrives in a round before it begins. A fresh process of a rank
arrives in the first round that no process of the rank has reached. Each round has keys
of its own, so that nothing of a dead process concerns a later one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import DistBackendError, DistStoreTimeoutError
from ..launch_variables import STORE
from ..rank_sets import group_by, name_ranks
from ..stores.base import LAUNCHER, Store
from ..stores.prefix import PrefixStore
from .arrival import arrived

__all__ = [
    "ENDED",
    "FRESH",
    "INIT",
    "LOST",
    "REBUILD",
    "LaunchedStore",
    "await_round",
    "is_launched",
    "join",
    "later_round",
    "note_begun",
]

#: The keys that the launcher sets when a rank has ended well, and when one that failed
#: is not started again while the others go on.
ENDED, LOST = "ended/{}", "lost/{}"
#: How a process comes to a round: by `init_process_group` as a fresh one of a rank that
#: died, or once more; or by ``rankscope.torch.rebuild()``, with the groups it has.
FRESH, INIT, REBUILD = "fresh", "init", "rebuild"

#: Seconds between two looks for ranks that have ended.
_LOOK = 0.25

# The round that this process came to last, whether it began, and whether any has begun.
_number: int | None = None
_began = _has_begun = False


class LaunchedStore(PrefixStore):
    """The keys of round `number`, in the store `base` of the launcher."""

    def __init__(self, base: Store, number: int, way: str = INIT) -> None:
        super().__init__(f"round/{number}", base)
        self.number, self.way = number, way
        self._owns_store = True
        #: Whether every rank has arrived.
        self.complete = False
        #: By rank: how each came, and with which groups (`World.export_groups`).
        self.arrivals: dict[int, dict[str, Any]] = {}

    @property
    def joins_groups(self) -> bool:
        """Whether this process is fresh among others that have kept their groups.

        Where all processes are fresh, too: none is as a process at its start.
        """
        ways = {one["way"] for one in self.arrivals.values()}
        return bool(ways) and self.way == FRESH and INIT not in ways

    def has_arrived(self, rank: int) -> bool:
        """Return whether a process of the rank has come to this round."""
        return arrived(self).check([str(rank)])

    def next(self, way: str) -> LaunchedStore:
        """Return the store of the next round, to which a rebuild leads."""
        return LaunchedStore(self.underlying_store, self.number + 1, way)

    def noted(self, key: str, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` of which the launcher has set `ENDED`, or `LOST`."""
        base = self.underlying_store
        return [rank for rank in ranks if base.check([key.format(rank)])]


def is_launched() -> bool:
    """Return whether the launcher of this rank serves a store.

    The ranks of a torchrun that such a rank has started have inherited the variable,
    and so have its children, which a script may give a ``MASTER_PORT`` of their own.
    """
    of_job = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("MASTER_PORT")
    return (*os.environ.get(STORE, "").split("/")[1:],) == of_job


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
    replaces = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
    way = FRESH if replaces and not _has_begun else INIT
    if _number is not None:
        # A process makes groups once more, or tries again a round that did not begin.
        found = LaunchedStore(base, _number + _began, way)
    else:
        found = LaunchedStore(base, 0, way)
        if replaces and all(found.has_arrived(one) for one in range(size)):
            while found.has_arrived(rank):
                found = LaunchedStore(base, found.number + 1, way)
    _come(found.number)
    return found


def _come(number: int) -> None:
    global _number, _began
    _number, _began = number, False


def note_begun(store: Store) -> None:
    """Note that this process has its groups in `store`; the next round is another."""
    global _began, _has_begun
    if isinstance(store, LaunchedStore):
        store.complete = _began = _has_begun = True


def await_round(
    store: LaunchedStore,
    rank: int,
    ranks: Sequence[int],
    timeout: float,
    groups: dict[str, Any] | None = None,
    *,
    goes_on: bool = False,
) -> list[int]:
    """Wait until `ranks` have arrived in a later round than the first.

    `groups` are those that this one has kept. Returns the ranks that are lost: their
    processes ended before they came, and the launcher starts no others. Only where the
    caller `goes_on` without them is that no error.
    """
    here = arrived(store)
    _come(store.number)
    here.set(str(rank), json.dumps({"way": store.way, "groups": groups}).encode())
    deadline = time.monotonic() + timeout
    lost: list[int] = []
    while True:
        left = deadline - time.monotonic()
        expected = [one for one in ranks if one not in lost]
        try:
            here.wait([str(one) for one in expected], max(0.0, min(_LOOK, left)))
            break
        except DistStoreTimeoutError as error:
            missing = [one for one in expected if not store.has_arrived(one)]
            _raise_if_ended(store, rank, missing, error)
            # Once a rank is lost no process of it can come any more.
            gone = store.noted(LOST, missing)
            lost += [one for one in gone if not store.has_arrived(one)]
            if lost and not goes_on:
                raise DistBackendError(
                    f"rank {rank} waits for all ranks to go on together, and "
                    f"{name_ranks(lost)} failed and will not be started again: the "
                    "ranks that live call rankscope.torch.shrink() in the place of "
                    "rebuild(); a rank that was started again cannot join them",
                    culprits=lost,
                ) from error
            if set(missing) - set(lost) and left <= _LOOK:
                # Who comes now must not take this rank for one that waits.
                here.delete_key(str(rank))
                raise DistStoreTimeoutError(
                    f"rank {rank} waits for all ranks to go on together, and "
                    f"{name_ranks(missing)} did not come within {timeout:g} s: the "
                    "ranks that live call rankscope.torch.rebuild(), and the launcher "
                    "starts a dead one again, up to --max-restarts times",
                    culprits=missing,
                ) from error
    store.arrivals = {one: json.loads(here.get(str(one))) for one in expected}
    note_begun(store)
    _raise_if_ways_differ(store, rank)
    return lost


def _raise_if_ended(
    store: LaunchedStore, rank: int, missing: Sequence[int], cause: BaseException
) -> None:
    ended = store.noted(ENDED, missing)
    if ended:
        raise DistBackendError(
            f"rank {rank} waits for all ranks to go on together, and "
            f"{name_ranks(ended)} ended without an error: nobody can go on",
            culprits=ended,
        ) from cause


def _raise_if_ways_differ(store: LaunchedStore, rank: int) -> None:
    came = group_by(sorted(store.arrivals), lambda one: store.arrivals[one]["way"])
    if INIT in came and REBUILD in came:
        raise DistBackendError(
            f"rank {rank} cannot go on: {name_ranks(came[REBUILD])} called "
            f"rankscope.torch.rebuild(), and {name_ranks(came[INIT])} "
            "init_process_group() once more: all ranks that live have to do the same",
            culprits=came[INIT],
        )
