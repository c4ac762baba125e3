"""Making, finding, aborting and rebuilding groups: the functions of c10d."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from .backend import unavailable_reason
from .config import BackendConfig
from .errors import DistError
from .group_life import Origin
from .late_errors import caller_knows, take_late_error
from .own_device import index_of, set_own_device
from .process_group import ProcessGroup
from .rendezvous import rendezvous
from .store import Store
from .world import DEFAULT, NonGroupMember, listed, world

__all__ = [
    "DEFAULT_TIMEOUT",
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "Group",
    "GroupMember",
    "abort_process_group",
    "as_seconds",
    "destroy_process_group",
    "enable_timing",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "new_group",
    "rebuild_process_group",
    "resolve_group",
    "shrink_group",
]

#: Of `shrink_group`: leave the group as it is, or abort it.
SHRINK_DEFAULT, SHRINK_ABORT = 0, 1

#: Seconds after which an op fails: c10d's default for every backend but NCCL.
DEFAULT_TIMEOUT = 1800.0

Group = ProcessGroup | NonGroupMember | None


class _GroupMeta(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, ``None`` before `init_process_group`."""
        return world.default


class group(metaclass=_GroupMeta):
    """``group.WORLD`` is the default group, as in ``torch.distributed``."""


class GroupMember(metaclass=_GroupMeta):
    """``GroupMember.WORLD``, and the type of what is not a member."""

    NON_GROUP_MEMBER = NonGroupMember


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
    Ranks meet through `store` (then `rank` and `world_size` are needed), or
    through `init_method`: ``env://`` (the default: ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR``, ``MASTER_PORT``), ``tcp://host:port`` or
    ``file:///path``. Backends are built at their first use, so a wrong
    library shows then. `device_id`, the CUDA device that this process uses (its
    number, a ``cupy.cuda.Device`` or a ``torch.device``), has that of ``cuda``
    built, and connected, at once. `group_name` and `pg_options` are accepted for
    c10d's signature.

    Raises `ValueError` for a bad backend string, rank, world size or device and
    where the default group is there already.
    """
    config = BackendConfig(backend)
    index = _device_index(device_id, config, "init_process_group")
    seconds = as_seconds(timeout, "init_process_group")
    if is_initialized():
        raise ValueError(
            "init_process_group: the default group is there already "
            f"({world.get_group(DEFAULT)!r}); call destroy_process_group() first"
        )
    owns_store = store is None
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
        set_own_device(index)
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
    the name it is shown and found by. No rank has to wait for another: all
    ranks may call it, or only the members (`use_local_synchronization` is
    accepted and changes nothing), each member its groups in the same order.
    `device_id`: as of `init_process_group`.

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
    # With NCCL its communicators can then be split off those of the default group.
    origin = Origin(default) if chosen == default.ranks else None
    made = world.new_group(chosen, group_desc, config, seconds, origin)
    if index is not None and isinstance(made, ProcessGroup):
        made.connect(index)
    return made


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: Group = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Make a group of the ranks of `group` but for some; only those that stay call it.

    `ranks_to_exclude` are ranks in `group`, which may be dead or hung. Backend
    string and timeout are those of `group`. NCCL's communicators are made out
    of those of `group` (``ncclCommShrink``, NCCL 2.27) where every rank that
    stays has them in good order; else, and with other backends, they are new.

    With ``SHRINK_DEFAULT`` `group` stays as it is. With ``SHRINK_ABORT`` it is
    aborted, on every rank: what is in flight in it raises `DistAbortedError`,
    and :func:`rebuild_process_group` is for the day when all its ranks are
    back. Returns at once. Unlike in ``torch.distributed`` global ranks and the
    default group stay what they are: pass the new group as `group`, or to
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
    if pg.rank in excluded:
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
        caller_knows(pg.status)
    return world.shrink(pg, excluded, abort=shrink_flags == SHRINK_ABORT)


def destroy_process_group(group: Group = None) -> None:
    """Free `group` and its backends; the default group takes all others along.

    Ops on a device get 10 s to end. Then it raises what an op failed with whose
    ``wait()`` had returned before, unless a later op or wait told of it: what the
    caller took for a result is none.
    """
    if isinstance(group, NonGroupMember):
        return
    if group is None:
        world.get_group(DEFAULT)
    world.destroy(group)
    if world.default is None:
        set_own_device(None)
    late = take_late_error()
    if late is not None:
        raise late


def abort_process_group(group: Group = None, reason: str = "") -> None:
    """Fail everything in flight in `group`, on every rank, and stop its backends.

    Returns at once, also while another thread hangs in an op of the group:
    that op raises `DistAbortedError` with `reason`. The group refuses ops
    until :func:`rebuild_process_group`.
    """
    pg = resolve_group(group, "abort_process_group")
    if threading.current_thread() is threading.main_thread():
        # Else the main thread may sit in a synchronize() that comes back with garbage.
        caller_knows(pg.status)
    pg.abort(reason)


def rebuild_process_group(group: Group = None) -> None:
    """Make an aborted group usable again; every rank of the group calls it.

    Same name and ranks, a new generation: fresh backends (built at their next
    use), sequence numbers from the start. Works of the old generation stay as
    they ended. Needs no communication.
    """
    pg = resolve_group(group, "rebuild_process_group")
    caller_knows(pg.status)
    pg.rebuild()


def enable_timing(group: Group = None, enabled: bool = True) -> None:
    """Time the Works of `group` that are made from now on, or do not.

    Whether a Work is timed is fixed when it is made. On by default.
    """
    resolve_group(group, "enable_timing").enable_timing(enabled)


def is_initialized() -> bool:
    """Whether the default group is there."""
    return world.default is not None


def get_rank(group: Group = None) -> int:
    """This process's rank in `group` (default: the default group); -1 if not in it."""
    if isinstance(group, NonGroupMember):
        return -1
    return resolve_group(group, "get_rank").rank


def get_world_size(group: Group = None) -> int:
    """The number of ranks in `group`; -1 if this rank is not in it."""
    if isinstance(group, NonGroupMember):
        return -1
    return resolve_group(group, "get_world_size").size()


def get_process_group_ranks(group: Group = None) -> list[int]:
    """The global ranks of `group`, by group rank."""
    if isinstance(group, NonGroupMember):
        return list(group.ranks)
    return list(resolve_group(group, "get_process_group_ranks").ranks)


def get_group_rank(group: Group, global_rank: int) -> int:
    """The rank in `group` of global rank `global_rank`; `ValueError` if not in it."""
    pg = resolve_group(group, "get_group_rank")
    if global_rank not in pg.ranks:
        raise ValueError(
            f"get_group_rank: rank {global_rank} is not in group {pg.name!r} "
            f"(ranks {listed(pg.ranks)})"
        )
    return pg.ranks.index(global_rank)


def get_global_rank(group: Group, group_rank: int) -> int:
    """The global rank of rank `group_rank` of `group`; `ValueError` if none."""
    pg = resolve_group(group, "get_global_rank")
    if not 0 <= group_rank < pg.size():
        raise ValueError(
            f"get_global_rank: group {pg.name!r} has ranks 0 to {pg.size() - 1}, "
            f"not {group_rank}"
        )
    return pg.ranks[group_rank]


def get_backend_config(group: Group = None) -> str:
    """The backend string of `group`, per device: ``cpu:gloo,cuda:nccl``."""
    return str(resolve_group(group, "get_backend_config").config)


def get_backend(group: Group = None) -> str:
    """The backend of the group's first device. Deprecated: a group has several."""
    warnings.warn(
        "get_backend() names one backend of a group that may hold several; use "
        "get_backend_config()",
        DeprecationWarning,
        stacklevel=2,
    )
    pg = resolve_group(group, "get_backend")
    return pg.config.device_backend_map[pg.first_device()]


def resolve_group(group: Group, op: str) -> ProcessGroup:
    """Return the group that `group` stands for, or raise what is wrong with it."""
    if group is None:
        return world.get_group()
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, NonGroupMember):
        group.refuse(op)
    raise TypeError(
        f"{op}: group is a {type(group).__name__}; expected a ProcessGroup "
        "(what new_group returned) or None"
    )


def as_seconds(timeout: float | timedelta | None, op: str) -> float:
    """Seconds of `timeout`, or the default; `ValueError` unless positive."""
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
    index = index_of(device_id, op)
    if "cuda" not in config.device_backend_map:
        raise ValueError(
            f"{op}: device_id={device_id!r} is a CUDA device, the group has {config}; "
            "expected a backend for 'cuda' beside it, such as cuda:nccl"
        )
    return index


def is_available() -> bool:
    """Whether this package can be used: always."""
    return True


def is_backend_available(backend: str) -> bool:
    """Whether `backend` is known and what it needs is installed here."""
    return unavailable_reason(backend) is None


def is_gloo_available() -> bool:
    """Whether the gloo backend (pygloo) can be used here."""
    return is_backend_available("gloo")


def is_mpi_available() -> bool:
    """Whether the MPI backend (mpi4py) can be used here."""
    return is_backend_available("mpi")


def is_nccl_available() -> bool:
    """Whether the NCCL backend (nccl4py and cupy) can be used here."""
    return is_backend_available("nccl")
