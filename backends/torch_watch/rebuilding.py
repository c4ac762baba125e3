"""Rebuild of torch's groups: each anew, in the same processes, over a fresh store."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ..errors import DistStoreTimeoutError, DistTimeoutError
from ..groups.abort_reason import AbortReason
from ..groups.key import GroupKey
from ..rank_sets import name_ranks
from ..routes import address_towards
from ..stores.base import Store
from . import holders
from .aborting import abort
from .creation import made_of
from .private.groups import Names, names
from .stores import host_store, join_store

__all__ = ["WAIT", "join", "rebuild"]

_log = logging.getLogger(__name__)

#: Seconds that the ranks of a group wait for each other in a rebuild.
WAIT = 30.0

# Torch's registry is one for the process.
_lock = threading.Lock()


def rebuild(group: Any, generation: int | None, store: Store) -> Any:
    """Make `group` anew with the same arguments, on each of its ranks; return it.

    Its ranks meet in `store`, one of Rankscope's; a torch TCPStore on its first rank
    then serves the new group. Variables, attributes and containers that hold `group`
    hold the new group afterwards, and the ``DistributedDataParallel`` modules over it
    use the new one; `Made.stale` has what cannot. Where `group` is not aborted yet, it
    is aborted first. `generation` is the same on every rank, ``None`` the next one;
    nothing is done where `group` has it already.

    Raises `DistTimeoutError` if a rank does not come within `WAIT` s. The group then is
    as it was: aborted.
    """
    torch = names()
    with _lock:
        made = made_of(group)
        if generation is None:
            generation = made.generation + 1
        if made.generation >= generation:
            return group
        name = made.name or group.group_desc
        reason = AbortReason(f"replaced by its generation {generation}", "rebuild")
        if not abort(group, reason):
            made.aborts += 1
        deadline = time.monotonic() + WAIT
        ranks = torch.ranks(group) or ()
        meeting = _Meeting(store, name, ranks, torch.c10d.get_rank(), generation)
        fresh = meeting.open(deadline)
        # The next group has this number as its name, on all ranks the same.
        torch.count = meeting.count
        arguments, is_default = made.arguments, group is torch.default
        # Where that fails, the group is in the registry as it was.
        with torch.out_of_registry(group) as places:
            new = _make(torch, arguments, is_default, places, fresh, deadline)
        known = made_of(new)
        known.place, known.name, known.generation = made.place, made.name, generation
        known.aborts = made.aborts
        known.stale = [
            *(f"{one} holds the old group" for one in holders.move(group, new)),
            *holders.reset(new),
        ]
        for sentence in known.stale:
            _log.warning("torch's group %r was rebuilt, but %s", name, sentence)
        return new


class _Meeting:
    """The ranks of one group, which agree over a store where to find torch's store."""

    def __init__(
        self, store: Store, name: str, ranks: Sequence[int], rank: int, generation: int
    ) -> None:
        self._store = store
        self._name = name
        self._ranks = ranks
        self._rank = rank
        self._generation = generation
        #: Torch's count of groups: the highest of the ranks, once all are here. It
        #: differs where some of them have called ``new_group``, and others have not.
        self.count = 0
        self._prefix = f"torch/{GroupKey(name, tuple(ranks)).id}/{generation}"

    def open(self, deadline: float) -> Any:
        """Return a fresh TCPStore, hosted by the first rank, once all are here."""
        limit = max(1.0, deadline - time.monotonic())
        made = None
        if self._rank == self._ranks[0]:
            host = _own_address(self._store)
            made, port = host_store(host, limit)
            self._store.set(f"{self._prefix}/address", json.dumps([host, port]))
        self._store.set(self._came(self._rank), str(names().count))
        self._wait(deadline)
        counts = [int(self._store.get(self._came(one))) for one in self._ranks]
        self.count = max(counts)
        if made is None:
            host, port = json.loads(self._store.get(f"{self._prefix}/address"))
            made = join_store(host, port, limit)
        return made

    def _came(self, rank: int) -> str:
        return f"{self._prefix}/came/{rank}"

    def _wait(self, deadline: float) -> None:
        began = time.monotonic()
        keys = [self._came(one) for one in self._ranks]
        try:
            self._store.wait(keys, max(0.0, deadline - began))
        except DistStoreTimeoutError as error:
            missing = [
                one for one in self._ranks if not self._store.check([self._came(one)])
            ]
            raise DistTimeoutError(
                f"rebuild of torch's group {self._name!r} on rank {self._rank}: "
                f"{name_ranks(missing)} did not come to generation {self._generation} "
                f"within {time.monotonic() - began:.0f} s; restart what is dead with "
                "%dist_restart, interrupt what is busy, then rebuild again",
                rank=self._rank,
                group=self._name,
                culprits=missing,
            ) from error


def _own_address(store: Store) -> str:
    """Return this host's address in the network towards the host of `store`."""
    host = getattr(store, "host", None)
    if host is None:
        return socket.gethostbyname(socket.gethostname())
    return address_towards(host)


def join(
    key: GroupKey,
    rank: int,
    arguments: Mapping[str, Any],
    generation: int,
    store: Store,
    place: int,
    count: int,
) -> Any:
    """Make a group in a fresh process, while the other ranks call `rebuild`.

    `rank` is this process's global rank; `arguments` are those of torch's function that
    makes groups, by name, but the store. `place` is the group's place among the others'
    groups, and `count` the number that torch gives the next group there as its name.
    """
    torch = names()
    with _lock:
        deadline = time.monotonic() + WAIT
        meeting = _Meeting(store, key.name, key.ranks, rank, generation)
        fresh = meeting.open(deadline)
        is_default = not arguments["global_ranks_in_group"]
        members = {one: number for number, one in enumerate(key.ranks)}
        new = _make(torch, arguments, is_default, members, fresh, deadline)
        made = made_of(new)
        made.name, made.generation, made.place = key.name, generation, place
        torch.count = max(count, meeting.count, torch.count)
        return new


def _make(
    torch: Names,
    arguments: Mapping[str, Any],
    is_default: bool,
    places: Mapping[int, int],
    fresh: Any,
    deadline: float,
) -> Any:
    c10d: Any = torch.c10d
    chosen = dict(arguments)
    chosen["store"] = c10d.PrefixStore("default_pg", fresh) if is_default else fresh
    timeout = chosen.get("timeout", c10d.default_pg_timeout)
    # The ranks connect to each other now: not to wait for 30 minutes, torch's default.
    chosen["timeout"] = min(
        timeout, timedelta(seconds=max(1.0, deadline - time.monotonic()))
    )
    new = torch.make(chosen, places, default=is_default)
    torch.set_timeout(new, timeout)
    # For the next rebuild.
    made_of(new).arguments = {**chosen, "timeout": timeout}
    return new
