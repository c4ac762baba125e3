"""torch's TCP stores, on a port of their own."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from typing import Any

from ..slurm_step import exchange_step, meeting_step, require_same_step
from .gloo_sockets import duplicate
from .private.groups import names

__all__ = [
    "disconnect",
    "ends_with_rank_0",
    "host_store",
    "is_gone",
    "join_store",
    "stay_in_step",
]

#: Connections that may wait for the store to accept them.
_BACKLOG = 512
#: Seconds in which the host of a store answers.
_PROBE_WAIT = 0.5


def host_store(host: str, timeout: float) -> tuple[Any, int]:
    """Open a ``torch.distributed.TCPStore`` here; return it and its port.

    It listens at `host` alone, the address at which the ranks reach this process: torch
    itself would listen on all addresses. A request may take `timeout` s.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
        port = int(listener.getsockname()[1])
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.fileno(),
            # Before, libuv's store made a socket of its own.
            use_libuv=names().release >= (2, 8),
        )
        # The store closes it.
        listener.detach()
    return store, port


def join_store(host: str, port: int, timeout: float) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def is_gone(store: Any) -> bool:
    """Return whether nobody serves a torch store any more.

    A call of such a store fails, too, but not without pages of torch in the log.
    """
    tcp = _tcp_store(store)
    if tcp is None:
        return False
    try:
        socket.create_connection((tcp.host, tcp.port), _PROBE_WAIT).close()
    except OSError:
        return True
    return False


def ends_with_rank_0(store: Any) -> bool:
    """Return whether rank 0 serves a torch store; under torchrun its agent may."""
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _tcp_store(store) is not None and not by_agent


def stay_in_step(store: Any, rank: int) -> None:
    """Raise `DistNetworkError` where a rank has come into the store of another step.

    The numbers of two steps of Slurm may give one port. Rank 0 of the second one
    cannot listen there; its others would be ranks of the first one's groups.
    """
    step, tcp = meeting_step(), _tcp_store(store)
    if not step or tcp is None or str(tcp.port) != os.environ["MASTER_PORT"]:
        return
    found = exchange_step(tcp, step, rank)
    require_same_step(found, step, rank, f"{tcp.host}:{tcp.port}")


def _tcp_store(store: Any) -> Any:
    """Return the ``TCPStore`` below prefixes; ``None`` for one of another kind."""
    from torch.distributed import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def disconnect(store: Any) -> int:
    """Shut down the connections of this process to the server of a torch store.

    A request that waits ends with an error at once, and later ones fail. Returns the
    number of connections: 0 for a store that has none, as a ``FileStore``.
    """
    store = _tcp_store(store)
    if store is None:
        return 0
    found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for *_, address in found}
    ended = 0
    for entry in os.listdir("/proc/self/fd"):
        with duplicate(int(entry)) as one, contextlib.suppress(OSError):
            if one is None or one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            # Listening sockets, and those whose other end is gone, have no peer.
            host, port = one.getpeername()[:2]
            if port == store.port and host.removeprefix("::ffff:") in hosts:
                one.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended
