"""Functions that make, find, abort and rebuild groups, as in c10d."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ..devices.cuda_device import bound_device, device_index, set_device
from ..errors import DistBackendError, DistError
from ..interface.registry import unavailable_reason
from ..stores.base import Store
from ..stores.prefix import PrefixStore
from ..work.async_errors import acknowledge, take_async_error
from .config import BackendConfig
from .exit_status import fail_on_async_error
from .membership import Group, is_initialized, resolve_group
from .non_member import NonGroupMember
from .origin import Origin
from .process_group import ProcessGroup
from .rendezvous import rendezvous
from .usable import mpi_instead, why_unusable
from .world import DEFAULT, world

__all__ = [
    "DEFAULT_TIMEOUT",
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "abort_process_group",
    "as_seconds",
    "destroy_process_group",
    "enable_timing",
    "init_process_group",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "new_group",
    "rebuild_process_group",
    "shrink_group",
    "split_group",
]

#: Flags of `shrink_group`: leave the group as it is, or abort it.
SHRINK_DEFAULT, SHRINK_ABORT = 0, 1

#: Seconds after which an op fails: c10d's default for every backend but NCCL.
DEFAULT_TIMEOUT = 1800.0

# Registered early, so that this handler is one of the last to run at exit.
atexit.register(fail_on_async_error)


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: float | timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Make the default process group; every rank calls it once.

    `backend`: see :class:`BackendConfig`. `timeout` (seconds or `timedelta`,
    default 30 min) bounds every op from its start and every rendezvous.
    Ranks connect through `store` (`rank` and `world_size` are then required), or
    through `init_method`: ``env://`` (the default: ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR``, ``MASTER_PORT``), ``tcp://host:port`` or
    ``file:///path``. Backends are built at their first use. With `device_id`, the
    CUDA device of this process (its number, a ``cupy.cuda.Device`` or a
    ``torch.device``), the backend of ``cuda`` is built, and connected, at once.
    `group_name` and `pg_options` are accepted for c10d's signature.

    Raises `ValueError` for a bad backend string, rank, world size or device, and
    if the default group exists already; `DistBackendError` where the library of every
    backend for host arrays is missing, and the config has no other backend.
    """
    config = BackendConfig(backend)
    unusable = why_unusable(backend)
    if unusable is not None:
        how = "init_process_group('cpu:mpi') on ranks that mpiexec starts"
        raise DistBackendError(
            f"init_process_group: {unusable}{mpi_instead(backend, how)}"
        )
    index = _device_index(device_id, config, "init_process_group")
    seconds = as_seconds(timeout, "init_process_group")
    if is_initialized():
        raise ValueError(
            "init_process_group: the default group is there already "
            f"({world.get_group(DEFAULT)!r}); call destroy_process_group() first"
        )
    owns_store = store is None
    if store is None and init_method is None and world.offered is not None:
        owns_store = False
        offered, rank, world_size = world.offered
        # Of this process's default groups, each has keys of its own.
        count = offered.add(f"init_process_group/{rank}", 1)
        store = PrefixStore(f"init_process_group/{count}", offered)
    if store is None:
        store, rank, world_size = rendezvous(init_method, rank, world_size, seconds)
    elif init_method is not None:
        raise ValueError("init_process_group: give store or init_method, not both")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"init_process_group: rank {rank} of world_size {world_size}; expected "
            "world_size >= 1 and 0 <= rank < world_size"
        )
    made = world.init(config, store, rank, world_size, seconds, owns_store)
    if index is not None:
        set_device(index)
        try:
            made.connect(index)
        except DistError:
            world.destroy()
            raise


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
) -> ProcessGroup | NonGroupMember:
    """Make a group of some of the world's ranks; return it, or a `NonGroupMember`.

    `ranks` are global ranks (default: all); they are sorted, as in c10d. The
    backend string and timeout default to the default group's. `group_desc` is
    the group's name for display and look-up. No rank waits for another: all ranks
    may call this function, or only the members (`use_local_synchronization` is
    accepted and has no effect). Members make their common groups in the same
    order. `device_id`: as in `init_process_group`. If that function was given one, the
    communicators of NCCL are begun there at once, in the background, as in c10d: an
    error of theirs aborts the new group, and its first op raises it.

    Raises `ValueError` for ranks that are not in the world or given twice, and for
    a bad device.
    """
    default = world.get_group(DEFAULT)
    size = default.size()
    chosen = sorted(range(size) if ranks is None else ranks)
    bad = [r for r in chosen if not isinstance(r, int) or not 0 <= r < size]
    if bad or not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(
            f"new_group on rank {default.global_rank}: ranks={list(ranks or [])}; "
            f"expected distinct global ranks, at least one, each from 0 to {size - 1}"
        )
    if group_desc == DEFAULT:
        raise ValueError(
            f"new_group on rank {default.global_rank}: group_desc={DEFAULT!r} is the "
            "name of the default group; expected another"
        )
    config = default.config if backend is None else BackendConfig(backend)
    index = _device_index(device_id, config, "new_group")
    seconds = default.timeout if timeout is None else as_seconds(timeout, "new_group")
    # With NCCL the communicators can then be split off those of the default group.
    origin = Origin(default) if chosen == default.ranks else None
    made = world.new_group(chosen, group_desc, config, seconds, origin)
    if index is None:
        index = _early_device(default, config)
    if index is not None and isinstance(made, ProcessGroup):
        made.connect(index)
    return made


def _early_device(parent: ProcessGroup, config: BackendConfig) -> int | None:
    """Return the device on which a new group with `config` is connected at once.

    It is the ``device_id`` of `init_process_group`, which all ranks give: a connection
    that some ranks begin and others never use would time out.
    """
    built = parent.built_backend("cuda")
    name = parent.config.device_backend_map.get("cuda")
    if built is None or not built.supports_split:
        # Other backends are built as they are needed.
        return None
    return bound_device() if config.device_backend_map.get("cuda") == name else None


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: Group = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Make a group without some ranks of `group`; only the other ranks call it.

    `ranks_to_exclude` are ranks in `group`, which may be dead or hung. Backend
    string and timeout are those of `group`. NCCL's communicators are derived from
    those of `group` (``ncclCommShrink``, NCCL 2.27) if they are intact on every
    remaining rank; otherwise, and with other backends, they are new.

    With ``SHRINK_DEFAULT`` `group` stays as it is. With ``SHRINK_ABORT`` `group` is
    aborted on every rank: its ops in flight raise `DistAbortedError`, and
    :func:`rebuild_process_group` makes `group` usable once all its ranks are back.
    Returns at once. Unlike in ``torch.distributed``, global ranks and the default
    group do not change: pass the new group as `group`, or to
    ``%%distributed --group``. `pg_options` is accepted for c10d's signature.

    Raises `ValueError` for ranks that are not in `group` or given twice, if
    none or all are excluded, if this rank is, and for unknown flags.
    """
    pg = resolve_group(group, "shrink_group")
    excluded = sorted(ranks_to_exclude)
    bad = [r for r in excluded if not isinstance(r, int) or not 0 <= r < pg.size()]
    if bad or len(set(excluded)) != len(excluded) or not 0 < len(excluded) < pg.size():
        raise ValueError(
            f"shrink_group on {pg.describe()}: ranks_to_exclude="
            f"{list(ranks_to_exclude)}; expected distinct ranks of the group, at "
            f"least one and not all, each from 0 to {pg.size() - 1}"
        )
    if pg.rank() in excluded:
        raise ValueError(
            f"shrink_group on {pg.describe()}: ranks_to_exclude={excluded} names "
            "this rank; only the ranks that stay call it"
        )
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(
            f"shrink_group on {pg.describe()}: shrink_flags={shrink_flags!r}; expected "
            "SHRINK_DEFAULT or SHRINK_ABORT"
        )
    if shrink_flags == SHRINK_ABORT:
        acknowledge(pg.status)
    return world.shrink(pg, excluded, abort=shrink_flags == SHRINK_ABORT)


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: float | timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> ProcessGroup | None:
    """Make disjoint groups of ranks of `parent_pg`; return this rank's one.

    `split_ranks` has the ranks of each new group, as ranks in `parent_pg`, the same
    lists on every rank of it; each is sorted, as in c10d. A rank in none of the lists
    gets ``None`` (``NCCL_SPLIT_NOCOLOR``) and need not call this function. Backend
    string and timeout default to those of `parent_pg`. Returns at once, and works with
    every backend: communicators of the new groups are made when `new_group` would make
    them, from a unique id of their own. `pg_options` is accepted for c10d's signature.

    Raises `ValueError` for lists that are empty, overlap, or name a rank that is not in
    the group.
    """
    pg = resolve_group(parent_pg, "split_group")
    lists = [sorted(ranks) for ranks in split_ranks or ()]
    named = [rank for ranks in lists for rank in ranks]
    if (
        not lists
        or not all(lists)
        or len(set(named)) < len(named)
        or not set(named) <= set(range(pg.size()))
    ):
        raise ValueError(
            f"split_group on {pg.describe()}: split_ranks={split_ranks}; expected "
            "lists of distinct ranks of the group, none of them empty and no rank in "
            f"two, each from 0 to {pg.size() - 1}"
        )
    mine = next((ranks for ranks in lists if pg.rank() in ranks), None)
    if mine is None:
        return None
    seconds = pg.timeout if timeout is None else as_seconds(timeout, "split_group")
    chosen = [pg.ranks[rank] for rank in mine]
    made = world.new_group(chosen, group_desc, pg.config, seconds)
    assert isinstance(made, ProcessGroup)
    index = _early_device(pg, pg.config)
    if index is not None:
        made.connect(index)
    return made


def destroy_process_group(group: Group = None) -> None:
    """Free `group` and its backends; with the default group, all groups are freed.

    Ops on a device get 10 s to end. The call then raises the error of an op that
    failed after its ``wait()`` had returned, unless a later op or wait raised that
    error, because the results that the caller has may be invalid.
    """
    if isinstance(group, NonGroupMember):
        return
    if group is None:
        world.get_group(DEFAULT)
    world.destroy(group)
    if world.default is None:
        set_device(None)
    late = take_async_error()
    if late is not None:
        raise late


def abort_process_group(group: Group = None, reason: str = "") -> None:
    """Fail all ops in flight in `group`, on every rank, and stop its backends.

    Returns at once, also while another thread hangs in an op of the group:
    that op raises `DistAbortedError` with `reason`. The group refuses ops
    until :func:`rebuild_process_group`.
    """
    pg = resolve_group(group, "abort_process_group")
    if threading.current_thread() is threading.main_thread():
        # Only here: after an abort from another thread, a synchronize() of the
        # main thread may return with invalid results.
        acknowledge(pg.status)
    pg.abort(reason)


def rebuild_process_group(group: Group = None) -> None:
    """Make an aborted group usable again; every rank of the group calls it.

    The group keeps its name and ranks and begins a new generation, with fresh
    backends (built at their next use) and sequence numbers from the start. Works
    of the old generation keep their final state. No communication is needed.
    """
    pg = resolve_group(group, "rebuild_process_group")
    acknowledge(pg.status)
    pg.rebuild()


def enable_timing(group: Group = None, enabled: bool = True) -> None:
    """Switch the timing of the Works of `group` that are made from now on.

    A Work is timed or not from its creation on. Timing is on by default.
    """
    resolve_group(group, "enable_timing").enable_timing(enabled)


def as_seconds(timeout: float | timedelta | None, op: str) -> float:
    """Return `timeout` or the default in seconds; `ValueError` unless positive."""
    if timeout is None:
        return DEFAULT_TIMEOUT
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(
            f"{op}: timeout is a {type(timeout).__name__}; expected seconds or a "
            "timedelta"
        )
    if not timeout > 0:
        raise ValueError(f"{op}: timeout={timeout:g}; expected more than 0 seconds")
    return float(timeout)


def _device_index(device_id: Any, config: BackendConfig, op: str) -> int | None:
    if device_id is None:
        return None
    index = device_index(device_id, op)
    if "cuda" not in config.device_backend_map:
        raise ValueError(
            f"{op}: device_id={device_id!r} is a CUDA device, the group has {config}; "
            "expected a backend for 'cuda' beside it, such as cuda:nccl"
        )
    return index


def is_available() -> bool:
    """Return whether this package can be used: always."""
    return True


def is_backend_available(backend: str) -> bool:
    """Return whether `backend` is registered and its libraries are installed."""
    return unavailable_reason(backend) is None


def is_gloo_available() -> bool:
    """Return whether the gloo backend (pygloo or xoscar) can be used here."""
    return is_backend_available("gloo")


def is_mpi_available() -> bool:
    """Return whether the MPI backend (mpi4py) can be used here."""
    return is_backend_available("mpi")


def is_nccl_available() -> bool:
    """Return whether the NCCL backend (nccl4py and cupy) can be used here."""
    return is_backend_available("nccl")
