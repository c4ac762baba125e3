"""How the ranks of torch meet as ranks of Rankscope: through torch's store."""

from __future__ import annotations

import json
import socket
from typing import Any

from ..errors import DistBackendError, DistNetworkError
from ..groups import launched
from ..groups.api import destroy_process_group, init_process_group
from ..groups.arrival import await_ranks
from ..groups.process_group import ProcessGroup
from ..groups.subgroups import new_group
from ..groups.world import world
from ..launch_variables import first_number
from . import joining
from .options import Options
from .private import DistStoreError, store_host, store_port

__all__ = [
    "default_ranks",
    "make_default_group",
    "make_group",
    "note_default_ranks",
    "require_members",
    "take_options",
]

# The key of torch's store with the address of Rankscope's own store. It has the number
# of the default group that a rank makes over one store of torch: it may make another.
_ADDRESS, _COUNT = "rankscope/{}", "rankscope/count/{}"


def default_ranks() -> list[int]:
    """Return Rankscope's global ranks by torch's, which differ after a shrink."""
    if not _default_ranks:
        default = world.default
        return [] if default is None else default.ranks
    return _default_ranks


_default_ranks: list[int] = []
# Whether the default group was there before torch's: the ranks are a notebook's.
_in_cells = False


def note_default_ranks(ranks: list[int]) -> None:
    """Note the global ranks of what is torch's default group now; empty: none."""
    _default_ranks[:] = ranks


def take_options(options: Any) -> Options:
    """Return `options` of a call of torch; `TypeError` where they are no such."""
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise TypeError(
            f"the backend rankscope: pg_options is a {type(options).__name__}; "
            "expected rankscope.torch.Options(transport='ucx'), or None"
        )
    return options


def make_default_group(
    store: Any, rank: int, size: int, timeout: float, options: Options
) -> tuple[ProcessGroup, bool]:
    """Return Rankscope's group for torch's default group, and whether it is new.

    `store` is torch's. In a notebook Rankscope's default group is there: it is the
    group, unless the timeout or the transport is another.

    Raises `DistBackendError` where the ranks of the two libraries differ.
    """
    default = world.default
    global _in_cells
    _in_cells = default is not None
    if default is None:
        return _meet(store, rank, size, timeout, options), True
    if (default.rank(), default.size()) != (rank, size):
        raise DistBackendError(
            f"init_process_group: torch calls this process rank {rank} of {size}, and "
            f"Rankscope's default group rank {default.rank()} of {default.size()}; "
            "expected the same numbers: call rankscope.destroy_process_group() first"
        )
    if options.transport is None and timeout == default.timeout:
        return default, False
    made = new_group(default.ranks, timeout, options.transport, group_desc="torch")
    assert isinstance(made, ProcessGroup)
    return made, False


def make_group(
    ranks: list[int], description: str, timeout: float, options: Options
) -> ProcessGroup:
    """Return a group for torch's `ranks`: a new one, or on a fresh rank the others'."""
    known = default_ranks()
    if not known:
        raise DistBackendError(
            "new_group: the backend rankscope needs a default group of its own: "
            "init_process_group('rankscope')"
        )
    members = [known[rank] for rank in ranks]
    if _in_cells:
        fresh = joining.joining()
        found = None if fresh is None else joining.adopt(members, description)
        if found is not None:
            return found
        joining.require_rejoined(members)
    made = new_group(
        members,
        timeout,
        options.transport,
        group_desc=description or None,
        sort_ranks=False,
    )
    assert isinstance(made, ProcessGroup)
    joining.note_made(made.key)
    return made


def require_members(group: ProcessGroup, op: str) -> None:
    """Raise `DistBackendError` where a fresh rank lacks a group of the others."""
    joining.require_members(group, op, in_cells=_in_cells)


def _meet(
    store: Any, rank: int, size: int, timeout: float, options: Options
) -> ProcessGroup:
    """Make Rankscope's default group over its own store, of the launcher or rank 0."""
    here = first_number(("RANK",)), first_number(("MASTER_PORT",))
    if launched.is_launched() and here == (rank, store_port(store)):
        init_process_group(options.transport, None, timeout, size, rank)
        assert world.default is not None
        return world.default
    key = _ADDRESS.format(store.add(_COUNT.format(rank), 1))
    if rank == 0:
        try:
            url = _serve(store_host(store), size, timeout, options)
        except BaseException as error:
            store.set(key, _refusal(error))
            raise
        store.set(key, json.dumps({"url": url}))
    else:
        told = json.loads(_wait_for(store, key, rank))
        if "error" in told:
            raise DistBackendError(
                f"init_process_group on rank {rank}: rank 0 could not make the group: "
                f"{told['error']}",
                culprits=[0],
            )
        _init(told["url"], rank, size, timeout, options)
    made = world.default
    assert made is not None
    try:
        # Rank 0 serves the store: did it fail at once, the others would not find it.
        assert world.store is not None
        await_ranks(world.store, rank, size, timeout)
    except BaseException as error:
        if rank == 0:
            # Who comes now would look for its store.
            store.set(key, _refusal(error))
        destroy_process_group()
        raise
    return made


def _refusal(error: BaseException) -> str:
    """Return what the others get from rank 0 where it made no group."""
    return json.dumps({"error": f"{type(error).__name__}: {error}"})


def _wait_for(store: Any, key: str, rank: int) -> bytes:
    """Return what rank 0 sets in torch's store, which has a timeout."""
    try:
        found: bytes = store.get(key)
    except DistStoreError as error:
        raise DistBackendError(
            f"init_process_group on rank {rank}: rank 0 did not come to it ({error}). "
            f"Where the others go on without an earlier process of rank {rank}, as "
            "after rankscope.torch.shrink(), this one joins them once all of them call "
            "destroy_process_group() and init_process_group('rankscope'); or start the "
            "job again. The models are made anew then, and load a checkpoint",
            culprits=[0],
        ) from error
    return found


def _serve(
    host: str, size: int, timeout: float, options: Options, attempts: int = 5
) -> str:
    """Make the default group on rank 0; return where the others find its store."""
    with socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
    url = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        _init(url, 0, size, timeout, options)
    except DistNetworkError:
        # Another process may have taken the port meanwhile.
        if attempts == 1:
            raise
        return _serve(host, size, timeout, options, attempts - 1)
    return url


def _init(url: str, rank: int, size: int, timeout: float, options: Options) -> None:
    # Rank 0 tells the others of its address before it waits for them.
    init_process_group(
        options.transport, url, timeout, size, rank, wait_for_workers=False
    )
