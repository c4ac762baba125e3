"""Rendezvous: obtain a store, a rank and a world size from an ``init_method``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from urllib.parse import parse_qs, unquote, urlsplit

from ..errors import DistError, DistNetworkError
from ..interface.registry import registrations_at_init
from ..launch_variables import ENV, OPEN_MPI, PMI, ranks, sizes
from ..slurm_step import (
    exchange_step,
    fill_environment,
    meeting_step,
    require_same_step,
    why_port_is_taken,
)
from ..stores.base import Store
from . import launched
from .arrival import has_left

__all__ = ["rendezvous"]

_log = logging.getLogger(__name__)

# In order of precedence. In a job of Slurm the rank of its shell is the same for all
# that the shell starts: it does not count.
_LAUNCHERS = (ENV, OPEN_MPI, PMI)
_RANK, _WORLD_SIZE, _MASTER = ranks(*_LAUNCHERS), sizes(*_LAUNCHERS), ENV.job

#: Whether torchrun's agent itself listens at MASTER_PORT, for torch: then our store has
#: a port as far from it, which no other job of the host should have.
_AGENT_LISTENS = "TORCHELASTIC_USE_AGENT_STORE"
_APART = 1009

#: Seconds between two looks for the store of new groups, and for which that is no news.
_LOOK, _SILENT = 0.05, 3.0

_FORMS = "expected env://, tcp://host:port or file:///path"


def rendezvous(
    init_method: str | None,
    rank: int,
    world_size: int,
    timeout: float,
    key: bytes | None = None,
    *,
    all_meet: bool = True,
) -> tuple[Store, int, int]:
    """Return a store that all ranks share, this rank and the world size.

    A `rank` or `world_size` of -1 is that of the URL (``?rank=0&world_size=4``), or of
    the environment. `timeout` (seconds) bounds the set-up and every later wait. `key`
    defaults to `tcp_keys.shared_key()`. `all_meet` is whether no rank makes the groups
    before all have come.
    """
    url = urlsplit("env://" if init_method is None else init_method)
    if url.scheme not in ("env", "tcp", "file"):
        raise ValueError(f"init_method {init_method!r}: {_FORMS}")
    query = parse_qs(url.query, strict_parsing=bool(url.query))
    rank = _from_query(query, "rank", rank)
    world_size = _from_query(query, "world_size", world_size)

    if url.scheme == "env":
        if not any(name in os.environ for name in _MASTER):
            found = _from_launcher(timeout, key)
            if found is not None:
                _agree("rank", found[1], rank)
                _agree("world_size", found[2], world_size)
                return found
        if rank == -1 and world_size == -1:
            fill_environment()
        rank, world_size, host, port = _from_environment(rank, world_size)
    elif rank == -1 or world_size == -1:
        rank = _integer(_RANK) if rank == -1 and _is_set(_RANK) else rank
        if world_size == -1 and _is_set(_WORLD_SIZE):
            world_size = _integer(_WORLD_SIZE)
    if world_size < 1:
        raise ValueError(f"world_size {world_size}: expected the number of ranks, ≥ 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank}: expected 0 to {world_size - 1}")
    if url.scheme == "env" and launched.is_launched():
        return launched.join(rank, world_size, timeout), rank, world_size
    if url.scheme == "file":
        if url.netloc not in ("", "localhost") or not url.path.strip("/"):
            raise ValueError(
                f"init_method {init_method!r}: expected file:/// and an absolute path"
            )
        from ..stores.file import FileStore

        path = unquote(url.path)
        file_store = FileStore(
            path, world_size, timeout, discard_stale=True, temporary=True
        )
        return file_store, rank, world_size
    if url.scheme == "tcp":
        try:
            host, port = url.hostname or "", url.port or 0
        except ValueError as error:
            raise ValueError(f"init_method {init_method!r}: {error}") from error
        if not host or not port:
            raise ValueError(f"init_method {init_method!r}: expected tcp://host:port")
    # Else rank 0 may have made the groups, and left them, before this rank comes.
    leaving = (rank, 0) if all_meet else (rank,)
    store = _tcp_store(host, port, rank, world_size, timeout, key, leaving)
    return store, rank, world_size


def _tcp_store(
    host: str,
    port: int,
    rank: int,
    size: int,
    timeout: float,
    key: bytes | None,
    leaving: Sequence[int],
) -> Store:
    """Return the store at `host`, but none that one of the ranks `leaving` has left."""
    from ..stores.tcp import TCPStore  # ZeroMQ takes 15 ms to import

    began = time.monotonic()
    told, step = False, meeting_step()
    while True:
        waited = time.monotonic() - began
        over = waited > timeout
        try:
            store = TCPStore(
                host,
                port,
                size,
                rank == 0,
                timeout,
                False,
                key=key,
                reports_deaths=True,
            )
            found = step and exchange_step(store, step, rank)
            # It may be that of earlier groups, which rank 0 is about to end.
            if found == step and (over or rank == 0 or not has_left(store, *leaving)):
                return store
            store.close()
            if waited > _SILENT:
                require_same_step(found, step, rank, f"{host}:{port}")
            if waited > _SILENT and not told:
                told = True
                _log.warning(
                    "init_process_group on rank %d: a process of this rank, or rank 0, "
                    "has left the groups at %s:%d, and others go on in them; it waits "
                    "up to %g s for their end. Was this rank alone started again?",
                    rank,
                    host,
                    port,
                    timeout,
                )
        except DistNetworkError as error:
            if not error.culprits and (taken := why_port_is_taken()):
                raise DistNetworkError(taken) from error
            if over or not error.culprits:
                raise
        time.sleep(_LOOK)


def _from_launcher(timeout: float, key: bytes | None) -> tuple[Store, int, int] | None:
    for registration in registrations_at_init():
        if registration.rendezvous is not None:
            launched = registration.rendezvous(timeout, key)
            if launched is not None:
                return launched
    return None


def _from_query(query: dict[str, list[str]], name: str, given: int) -> int:
    if name not in query:
        return given
    try:
        value = int(query[name][0])
    except ValueError as error:
        raise ValueError(
            f"init_method: {name}={query[name][0]!r} is no integer"
        ) from error
    _agree(name, value, given)
    return value


def _agree(name: str, found: int, given: int) -> None:
    if given not in (-1, found):
        raise ValueError(f"the init_method says {name}={found}, the argument {given}")


def _is_set(names: Sequence[str]) -> bool:
    return any(os.environ.get(name) for name in names)


def _integer(names: Sequence[str]) -> int:
    """Return the value of the first of `names` that is set in the environment."""
    name = next(name for name in names if os.environ.get(name))
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise DistError(
            f"the environment variable {name} is {os.environ[name]!r}, no integer"
        ) from error


def _from_environment(rank: int, world_size: int) -> tuple[int, int, str, int]:
    needed: list[Sequence[str]] = [["MASTER_ADDR"], ["MASTER_PORT"]]
    needed += [_RANK] if rank == -1 else []
    needed += [_WORLD_SIZE] if world_size == -1 else []
    missing = [names[0] for names in needed if not _is_set(names)]
    if missing:
        raise DistError(
            f"init_method env://: not set in the environment: {', '.join(missing)}. "
            "Set this on every rank, start it as a task of srun, or give rank=, "
            "world_size= and init_method='tcp://host:port'"
        )
    return (
        _integer(_RANK) if rank == -1 else rank,
        _integer(_WORLD_SIZE) if world_size == -1 else world_size,
        os.environ["MASTER_ADDR"],
        _port(_integer(["MASTER_PORT"])),
    )


def _port(port: int) -> int:
    """Return the port of the store, where ``MASTER_PORT`` is `port`."""
    if os.environ.get(_AGENT_LISTENS) != "True" or not port:
        return port
    return port + _APART if port + _APART < 1 << 16 else port - _APART
