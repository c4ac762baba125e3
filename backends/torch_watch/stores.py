"""torch's TCP stores, on a port of their own."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from typing import Any

from .gloo_sockets import duplicate
from .private.groups import names

__all__ = ["disconnect", "host_store", "join_store"]

#: Connections that may wait for the store to accept them.
_BACKLOG = 512


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
            use_libuv=names().store_of_libuv_takes_socket,
        )
        # The store closes it.
        listener.detach()
    return store, port


def join_store(host: str, port: int, timeout: float) -> Any:
    """Connect to the store at `host` and `port`; see `host_store`."""
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def disconnect(store: Any) -> int:
    """Shut down the connections of this process to the server of a torch store.

    A request that waits ends with an error at once, and later ones fail. Returns the
    number of connections: 0 for a store that has none, as a ``FileStore``.
    """
    from torch.distributed import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
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
