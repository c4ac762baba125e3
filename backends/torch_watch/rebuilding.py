"""Rebuild of torch's groups: each anew, in the same processes, over a fresh store."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ..errors import DistStoreTimeoutError, DistTimeoutError
from ..groups.abort_reason import AbortReason
from ..groups.key import GroupKey
from ..rank_sets import name_ranks
from ..stores.base import Store
from . import creation, holders
from .aborting import abort
from .creation import made_of
from .stores import host_store, join_store

__all__ = ["WAIT", "join", "rebuild"]

_log = logging.getLogger(__name__)

#: Seconds that the ranks of a group wait for each other in a rebuild.
WAIT = 30.0

# Torch's registry is one for the process.
_lock = threading.Lock()


def rebuild(
    group: Any, generation: int | None, store: Store, *, timeout: float = WAIT
) -> tuple[Any, list[str]]:
    """Make `group` anew with the same arguments; call it on each of its ranks.

    Its ranks meet in `store`; a torch TCPStore on its first rank then serves the new
    group. Variables, attributes and containers that hold `group` hold the new group
    afterwards, and the ``DistributedDataParallel`` modules over it use the new one.
    Where `group` is not aborted yet, it is aborted first.

    Parameters
    ----------
    group
        A ``ProcessGroup`` of torch.
    generation
        The number of the new group's generation, the same on every rank; ``None``: the
        next one. Nothing is done where `group` has it already.
    store
        A store of Rankscope's that all ranks of the group are connected to.
    timeout
        Seconds to wait for the other ranks.

    Returns
    -------
    tuple of (ProcessGroup, list of str)
        The new group, and what holds the old one still: see `holders.move`.

    Raises
    ------
    DistTimeoutError
        Where a rank does not come in time. The group then is as it was: aborted.
    """
    from torch.distributed import distributed_c10d

    with _lock:
        made = made_of(group)
        if generation is None:
            generation = made.generation + 1
        if made.generation >= generation:
            return group, []
        name = made.name or group.group_desc
        abort(group, AbortReason(f"replaced by its generation {generation}", "rebuild"))
        deadline = time.monotonic() + timeout
        members = distributed_c10d._world.pg_group_ranks[group]
        ranks = sorted(members, key=members.__getitem__)
        meeting = _Meeting(store, name, ranks, distributed_c10d.get_rank(), generation)
        fresh = meeting.open(deadline)
        # The next group has this number as its name, on all ranks the same.
        distributed_c10d._world.group_count = meeting.count
        new = _replace(distributed_c10d, group, fresh, deadline)
        creation.note_rebuilt(new, made, generation)
        left = holders.move(group, new)
        for holder in left:
            _log.warning("group %r was rebuilt, but %s holds the old one", name, holder)
        return new, left


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
        """Return a fresh torch TCPStore, hosted by the first rank, once all are here.

        No rank changes anything before each of them has come.
        """
        limit = max(1.0, deadline - time.monotonic())
        made = None
        if self._rank == self._ranks[0]:
            host = _own_address(self._store)
            made, port = host_store(host, limit)
            self._store.set(f"{self._prefix}/address", json.dumps([host, port]))
        from torch.distributed import distributed_c10d

        count = distributed_c10d._world.group_count
        self._store.set(self._came(self._rank), str(count))
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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: it picks the route.
        probe.connect((host, 9))
        return probe.getsockname()[0]


def join(
    key: GroupKey,
    rank: int,
    arguments: Mapping[str, Any],
    generation: int,
    store: Store,
    place: int,
    count: int,
    *,
    timeout: float = WAIT,
) -> Any:
    """Make a group in a fresh process, while the other ranks call `rebuild`.

    Parameters
    ----------
    key, rank
        The group, and this process's global rank.
    arguments
        The arguments of `creation.MAKER`, but the store.
    generation
        The number of the generation that the others make.
    store
        The store that all ranks of the group are connected to.
    place, count
        The group's place among the others' groups, and the number that torch gives the
        next group there as its name.
    timeout
        Seconds to wait for the other ranks.
    """
    from torch.distributed import distributed_c10d

    with _lock:
        deadline = time.monotonic() + timeout
        meeting = _Meeting(store, key.name, key.ranks, rank, generation)
        fresh = meeting.open(deadline)
        is_default = not arguments["global_ranks_in_group"]
        members = {one: number for number, one in enumerate(key.ranks)}
        new = _make(distributed_c10d, arguments, is_default, members, fresh, deadline)
        made = made_of(new)
        made.name, made.generation, made.place = key.name, generation, place
        world = distributed_c10d._world
        world.group_count = max(count, meeting.count, world.group_count)
        return new


def _replace(c10d: Any, old: Any, fresh: Any, deadline: float) -> Any:
    """Make the successor of `old` and enter it in torch's registry in place of `old`.

    Where that fails, `old` is in the registry as it was.
    """
    arguments = made_of(old).arguments
    is_default = old is c10d._world.default_pg
    with _out_of_registry(c10d, old) as members:
        return _make(c10d, arguments, is_default, members, fresh, deadline)


def _make(
    c10d: Any,
    arguments: Mapping[str, Any],
    is_default: bool,
    members: Mapping[int, int],
    fresh: Any,
    deadline: float,
) -> Any:
    """Make a group over the store `fresh` and enter it in torch's registry."""
    chosen = dict(arguments)
    chosen["store"] = c10d.PrefixStore("default_pg", fresh) if is_default else fresh
    timeout = chosen.get("timeout", c10d.default_pg_timeout)
    # The ranks connect to each other now: not to wait for 30 minutes, torch's default.
    chosen["timeout"] = min(
        timeout, timedelta(seconds=max(1.0, deadline - time.monotonic()))
    )
    with _without_split(c10d, chosen):
        new, _ = getattr(c10d, creation.MAKER)(**chosen)
    c10d._world.pg_group_ranks[new] = dict(members)
    if is_default:
        c10d._update_default_pg(new)
    c10d._set_pg_timeout(timeout, new)
    # For the next rebuild.
    made_of(new).arguments = {**chosen, "timeout": timeout}
    return new


@contextlib.contextmanager
def _out_of_registry(c10d: Any, old: Any) -> Iterator[Mapping[int, int]]:
    """Within the block, torch's registry does not have `old`; nor after a success.

    Yields the ranks of `old` in the group by their global ranks.
    """
    world = c10d._world
    tables = [
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.pg_coalesce_state,
    ]
    kept = [(table, table.pop(old)) for table in tables if old in table]
    tags = [members for members in world.tags_to_pg.values() if old in members]
    for members in tags:
        members.remove(old)
    is_default = old is world.default_pg
    if is_default:
        c10d._update_default_pg(None)
    name = old.group_name
    c10d._unregister_process_group(name)
    try:
        yield next(entry for table, entry in kept if table is world.pg_group_ranks)
    except BaseException:
        for table, entry in kept:
            table[old] = entry
        for members in tags:
            members.append(old)
        if is_default:
            c10d._update_default_pg(old)
        c10d._register_process_group(name, old)
        raise


@contextlib.contextmanager
def _without_split(c10d: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Within the block, no communicator is split from the default group's.

    A split needs the ranks that are not in the group as well, which take no part.
    """
    for name in ("backend_options", "pg_options"):
        options: Any = arguments.get(name)
        if options is not None and hasattr(options, "split_from"):
            options.split_from = None
    if "_get_split_source" not in vars(c10d):
        yield
        return
    original = c10d._get_split_source
    c10d._get_split_source = lambda _: None
    try:
        yield
    finally:
        c10d._get_split_source = original
