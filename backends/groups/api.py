"""Functions that make the default group, and end, abort and rebuild any; as in c10d."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from datetime import timedelta
from typing import Any

from ..devices.cuda_device import set_device
from ..errors import DistBackendError, DistError
from ..interface.registry import unavailable_reason
from ..quantities import as_int, as_timeout
from ..stores.base import Store
from ..work.async_errors import acknowledge, take_async_error
from . import arrival, launched, unattended
from .config import BackendConfig, bound_index, default_instead, why_unusable
from .job import leave_to_rebuild
from .membership import Group, is_initialized, resolve_group
from .rendezvous import rendezvous
from .spec import NonGroupMember
from .world import DEFAULT, world

__all__ = [
    "DEFAULT_TIMEOUT",
    "abort_process_group",
    "default_pg_timeout",
    "destroy_process_group",
    "enable_timing",
    "fail_on_async_error",
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

    Returns when every rank has called it, and builds no backend: a backend is built at
    its first use. Ranks connect through `store` or through `init_method`.

    The semantics are those of ``torch.distributed.init_process_group``;
    `wait_for_workers` is Rankscope's own.

    Parameters
    ----------
    backend : str, optional
        The backends of the group: one name, or one per device type as in
        ``"cpu:tcp,cuda:nccl"`` (see `BackendConfig`). The default is tcp for arrays
        on the CPU, and nccl for arrays on CUDA where cupy is installed.
    init_method : str, optional
        Where the ranks meet: ``env://``, the default, for ``RANK``, ``WORLD_SIZE``,
        ``MASTER_ADDR`` and ``MASTER_PORT`` of the environment, as torchrun sets them;
        ``tcp://host:port``; ``file:///path``. mpiexec sets variables of its own for the
        first two. Under mpiexec, with mpi4py, MPI itself tells where the ranks meet if
        neither of the last two is set.
    timeout : float or timedelta, optional
        Bounds every op of the group, from its start, and every rendezvous; in seconds
        if it is a number. The default is 30 minutes.
    world_size, rank : int, default -1
        The number of ranks, and which of them this one is; -1 where `init_method`
        tells.
    store : Store, optional
        What the ranks connect through, in the place of `init_method`; needs `rank` and
        `world_size`.
    group_name : str, optional
        Not used: accepted for c10d's signature.
    pg_options : object, optional
        Not used: accepted for c10d's signature.
    device_id : int, cupy.cuda.Device or torch.device, optional
        The CUDA device of this process. The backend of ``cuda`` is then built, and
        connected, at once.
    wait_for_workers : bool, default True
        Whether to wait for the other ranks, the same on every rank; else the first op
        does.

    Raises
    ------
    ValueError
        A bad backend string, URL, rank, world size, timeout or device; `store` and
        `init_method` are both given; or the default group exists.
    TypeError
        An argument is of another type.
    DistError
        ``env://``: a variable of the environment is missing, or is no integer. The
        message names it.
    DistStoreTimeoutError
        Ranks did not come within `timeout`; the message names them.
    DistAbortedError
        In a cell, which has raised on another rank: that one will not come.
    DistNetworkError, DistStoreError
        The rendezvous cannot be reached: its address, or its file.
    DistBackendError
        The library of every backend in `backend` is missing; or, with `device_id`, the
        backend of ``cuda`` cannot be made.

    Examples
    --------
    >>> dist.init_process_group("tcp", store=dist.HashStore(), rank=0, world_size=1)
    >>> x = np.ones(2)
    >>> dist.all_reduce(x)
    >>> dist.destroy_process_group()
    """
    config = BackendConfig(backend)
    unusable = why_unusable(backend)
    if unusable is not None:
        raise DistBackendError(
            f"init_process_group: {unusable}"
            f"{default_instead(backend, 'init_process_group()')}"
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
    # Its ranks have met, and those that are yet to come do not know of the address.
    in_torch = bool(world.sources) and not wait_for_workers
    for hear in unattended.before_init:
        hear(rank, world_size, None if in_torch else init_method)
    enters = wait_for_workers
    if store is None and init_method is None and world.offered is not None:
        store, rank, world_size = world.offered
        enters = True
    if store is not None and init_method is not None:
        raise ValueError("init_process_group: give store or init_method, not both")
    owns_store = store is None
    with world.joining(), contextlib.ExitStack() as undo:
        if store is None:
            store, rank, world_size = rendezvous(
                init_method, rank, world_size, seconds, all_meet=enters
            )
            undo.callback(store.close)
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"init_process_group: rank {rank} of world_size {world_size}; expected "
                "world_size >= 1 and 0 <= rank < world_size"
            )
        if enters and not owns_store:
            given, store = store, arrival.enter(store, rank)
            undo.callback(arrival.leave, given, rank)
        later = launched.later_round(store)
        if wait_for_workers and later is None:
            otherwise = " With wait_for_workers=False it returns without the others"
            arrival.await_ranks(store, rank, world_size, seconds, otherwise)
        made = world.init(
            config, store, rank, world_size, seconds, owns_store=owns_store
        )
        undo.pop_all()
    if later is not None:
        # Once the group is there: the others learn of a death from now on.
        try:
            launched.await_round(later, rank, range(world_size), seconds)
        except BaseException:
            world.destroy()
            raise
    launched.note_begun(store)
    if index is not None:
        set_device(index)
        try:
            made.connect(index)
        except DistError:
            world.destroy()
            raise


def destroy_process_group(group: Group = None) -> None:
    """Free `group` and its backends; with the default group, all groups are freed.

    Ops in flight get 10 s to end, so that others receive what was sent; those on a
    device alone where an error is being handled, as in a ``finally``: the group is then
    aborted at once, as it is if they do not end.

    The semantics are those of ``torch.distributed.destroy_process_group``.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; ``None`` is the default group, and so all groups.

    Raises
    ------
    ValueError
        `group` is ``None``, and there is no default group.
    DistBackendError
        An op failed after its ``wait()`` had returned, and no later op or wait raised
        its error: results that the caller has may be invalid. The groups are freed.

    Examples
    --------
    >>> dist.init_process_group("tcp", store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.destroy_process_group()
    >>> dist.is_initialized()
    False
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

    Returns at once, also while another thread hangs in an op of the group: that op
    raises `DistAbortedError` with `reason`. The group refuses ops until
    `rebuild_process_group`.

    ``torch.distributed`` has ``_abort_process_group``, for NCCL, without `reason`.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; ``None`` is the default group.
    reason : str, optional
        Why; the errors on all ranks say it.

    Raises
    ------
    TypeError, ValueError
        `group` is no group that this rank is in, or ``None`` without a default group.

    Examples
    --------
    >>> dist.abort_process_group(reason="to try it")
    >>> try:
    ...     dist.all_reduce(np.ones(2))
    ... except dist.DistAbortedError as error:
    ...     print(error.reason)
    to try it
    >>> dist.rebuild_process_group()
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
    of the old generation keep their final state. The ranks do not wait for one another.

    Where the group was not aborted, the ops that the other ranks have in flight with
    this one end, with this call, and the exception that it handles, as their reason.

    ``torch.distributed`` has no such function.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; ``None`` is the default group.

    Raises
    ------
    TypeError, ValueError
        `group` is no group that this rank is in, or ``None`` without a default group;
        or the group was destroyed.

    Examples
    --------
    >>> dist.abort_process_group()
    >>> dist.rebuild_process_group()
    >>> x = np.ones(2)
    >>> dist.all_reduce(x)
    >>> dist.group.WORLD.generation
    1
    """
    pg = resolve_group(group, "rebuild_process_group")
    acknowledge(pg.status)
    leave_to_rebuild([pg], "rebuild_process_group()")
    pg.rebuild()


def enable_timing(group: Group = None, enabled: bool = True) -> None:
    """Switch the timing of the Works of `group` that are made from now on.

    A Work is timed or not from its creation on. Timing is on by default.

    In ``torch.distributed`` it is ``ProcessGroup._enable_collectives_timing``.

    Parameters
    ----------
    group : ProcessGroup, optional
        The group; ``None`` is the default group.
    enabled : bool, default True
        Whether Works are timed.

    Raises
    ------
    TypeError, ValueError
        `group` is no group that this rank is in, or ``None`` without a default group.

    Examples
    --------
    >>> dist.enable_timing(enabled=False)
    >>> work = dist.all_reduce(np.ones(2), async_op=True)
    >>> work.wait(), work.get_duration()
    (True, None)
    """
    resolve_group(group, "enable_timing").enable_timing(enabled)


def is_available() -> bool:
    """Return whether this package can be used: always.

    For programs that ask ``torch.distributed.is_available()`` first.

    Examples
    --------
    >>> dist.is_available()
    True
    """
    return True


def is_backend_available(backend: str) -> bool:
    """Return whether `backend` is registered and its libraries are installed.

    The semantics are those of ``torch.distributed.is_backend_available``.

    Parameters
    ----------
    backend : str
        The name of a backend; `unavailable_reason` says why it cannot be used.

    Examples
    --------
    >>> dist.is_backend_available("no such backend")
    False
    """
    return unavailable_reason(backend) is None


def is_gloo_available() -> bool:
    """Return whether the gloo backend can be used: pygloo or xoscar is installed.

    The semantics are those of ``torch.distributed.is_gloo_available``.

    Examples
    --------
    >>> isinstance(dist.is_gloo_available(), bool)
    True
    """
    return is_backend_available("gloo")


def is_mpi_available() -> bool:
    """Return whether the MPI backend can be used: mpi4py and an MPI are installed.

    The semantics are those of ``torch.distributed.is_mpi_available``.

    Examples
    --------
    >>> isinstance(dist.is_mpi_available(), bool)
    True
    """
    return is_backend_available("mpi")


def is_nccl_available() -> bool:
    """Return whether the NCCL backend can be used: nccl4py, cupy and a GPU are there.

    The semantics are those of ``torch.distributed.is_nccl_available``.

    Examples
    --------
    >>> isinstance(dist.is_nccl_available(), bool)
    True
    """
    return is_backend_available("nccl")


def is_ucc_available() -> bool:
    """Return whether a backend called ``ucc`` is registered and can be used here.

    Rankscope comes without one. As ``torch.distributed.is_ucc_available``.

    Examples
    --------
    >>> dist.is_ucc_available()
    False
    """
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return whether a backend called ``xccl`` is registered and can be used here.

    Rankscope comes without one. As ``torch.distributed.is_xccl_available``.

    Examples
    --------
    >>> dist.is_xccl_available()
    False
    """
    return is_backend_available("xccl")


def fail_on_async_error() -> None:
    """End the script with status 120 if an op failed unseen after ``wait()``."""
    error = world.async_error()
    if error is None or hasattr(sys, "ps1") or hasattr(sys, "last_value"):
        return
    with contextlib.suppress(OSError, ValueError):
        message = f"rankscope: results of this script are garbage: {error}"
        print(message, file=sys.stderr, flush=True)
    sys.stderr = _FailingStderr(sys.stderr)


class _FailingStderr:
    """A stderr whose last flush fails, for which Python ends with status 120.

    An exception of an exit handler does not change the status, and ``os._exit``
    would skip the exit handlers of others and what they flush. Python says nothing
    where stderr, unlike stdout, cannot be flushed.
    """

    closed = False

    def __init__(self, stderr: Any) -> None:
        self._stderr = stderr

    def flush(self) -> None:
        """Flush stderr, then fail."""
        if self._stderr is not None:
            self._stderr.flush()
        raise OSError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stderr, name)


# Registered early, so that this handler is one of the last to run at exit.
atexit.register(fail_on_async_error)
