"""torch's TCP stores, on a port of their own."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

__all__ = ["host_store", "join_store"]

#: Connections that may wait for the store to accept them.
_BACKLOG = 512


def host_store(host: str, timeout: float) -> tuple[Any, int]:
    """Open a ``torch.distributed.TCPStore`` here; return it and its port.

    Parameters
    ----------
    host
        The address at which the ranks reach this process. The store listens there
        alone: torch itself would listen on all addresses of the host.
    timeout
        Seconds that a request to the store may take.
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
        )
        # The store closes it.
        listener.detach()
    return store, port


def join_store(host: str, port: int, timeout: float) -> Any:
    """Connect to the store at `host` and `port`; see `host_store`."""
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
