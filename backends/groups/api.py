"""Functions that make the default group, and end, abort and rebuild any; as in c10d."""

from __future__ import annotations

import atexit
import threading
from datetime import timedelta
from typing import Any

from ..devices.cuda_device import set_device
from ..errors import DistBackendError, DistError
from ..interface.registry import unavailable_reason
from ..quantities import as_int, as_timeout
from ..stores.base import Store
from ..work.async_errors import acknowledge, take_async_error
from . import arrival
from .config import BackendConfig, bound_index
from .exit_status import fail_on_async_error
from .membership import Group, is_initialized, resolve_group
from .non_member import NonGroupMember
from .rendezvous import rendezvous
from .usable import mpi_instead, why_unusable
from .world import DEFAULT, world

__all__ = [
    "DEFAULT_TIMEOUT",
    "abort_process_group",
    "default_pg_timeout",
    "destroy_process_group",
    "enable_timing",
    "init_process_group",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_ucc_available",
    "is_xccl_available",
    "rebuild_process_group",
]

#: Seconds after which an op fails: c10d's default for every backend but NCCL.
DEFAULT_TIMEOUT = 1800.0
default_pg_timeout = timedelta(seconds=DEFAULT_TIMEOUT)

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
    *,
    wait_for_workers: bool = True,
) -> None:
    """Make the default process group; every rank calls it once.

    Returns when every rank has called it. With `wait_for_workers` false, the same on
    every rank, it does not wait for the others: the first op does.

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
    if the default group exists already; `DistStoreTimeoutError`, which names them, if
    ranks do not come within `timeout`; `DistBackendError` where the library of every
    backend for host arrays is missing, and the config has no other backend.
    """
    config = BackendConfig(backend)
    unusable = why_unusable(backend)
    if unusable is not None:
        how = "init_process_group('cpu:mpi') on ranks that mpiexec starts"
        raise DistBackendError(
            f"init_process_group: {unusable}{mpi_instead(backend, how)}"
        )
    index = bound_index(device_id, config, "init_process_group")
    seconds = as_timeout(timeout, DEFAULT_TIMEOUT, "init_process_group: timeout")
    rank = as_int(rank, "init_process_group: rank")
    world_size = as_int(world_size, "init_process_group: world_size")
    if is_initialized():
        raise ValueError(
            "init_process_group: the default group is there already "
            f"({world.get_group(DEFAULT)!r}); call destroy_process_group() first"
        )
    given, offered = store, None
    if store is None and init_method is None and world.offered is not None:
        given, rank, world_size = world.offered
        offered = given
    if given is not None and init_method is not None:
        raise ValueError("init_process_group: give store or init_method, not both")
    owned = None
    if given is None:
        owned, rank, world_size = rendezvous(init_method, rank, world_size, seconds)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"init_process_group: rank {rank} of world_size {world_size}; expected "
            "world_size >= 1 and 0 <= rank < world_size"
        )
    entered = given is not None and (wait_for_workers or given is offered)
    used = owned if given is None else given
    assert used is not None
    if entered:
        used = arrival.enter(used, rank)
    try:
        if wait_for_workers:
            arrival.await_ranks(used, rank, world_size, seconds)
        made = world.init(
            config, used, rank, world_size, seconds, owns_store=owned is not None
        )
    except BaseException:
        if owned is not None:
            owned.close()
        elif entered and given is not None:
            arrival.leave(given, rank)
        raise
    if index is not None:
        set_device(index)
        try:
            made.connect(index)
        except DistError:
            world.destroy()
            raise


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
    else:
        group = resolve_group(group, "destroy_process_group")
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
    pg.abort(reason or "abort_process_group()")


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


def is_ucc_available() -> bool:
    """Return whether a backend called ``ucc`` is registered and can be used here."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return whether a backend called ``xccl`` is registered and can be used here."""
    return is_backend_available("xccl")
