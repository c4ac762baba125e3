"""Ports for a controller: free, and not among those of outgoing connections."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

__all__ = ["reserved_ports"]

#: The first port that is tried: services have the numbers below it.
FIRST = 20_000
#: The file with the range of the ports that the system gives to connections.
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Reserve `count` ports at which a server can listen during the block.

    By itself a controller chooses free ports of the range that connections get theirs
    from, closes them, and listens seconds later: on a busy machine a connection may
    have got one by then. An empty list: there are too few ports below that range.

    A socket is bound to each port until the end of the block, so that no other cluster
    that starts meanwhile chooses it. A server can bind its own beside it, as ZeroMQ
    does, where both have ``SO_REUSEADDR`` and this one does not listen.
    """
    with contextlib.ExitStack() as stack:
        last = int(EPHEMERAL.read_text().split()[0])
        candidates = range(FIRST, last)
        found: list[int] = []
        if len(candidates) >= 10 * count:
            # Not by the generator of the user, who would draw other numbers afterwards.
            for port in random.SystemRandom().sample(candidates, 10 * count):
                if len(found) < count and _reserve(port, stack):
                    found.append(port)
        yield found if len(found) == count else []


def _reserve(port: int, stack: contextlib.ExitStack) -> bool:
    """Bind a socket to the port until `stack` ends; return whether it was free."""
    holder = socket.socket()
    try:
        # On all addresses, as a controller may listen. Without SO_REUSEADDR, which
        # would share the port with another reservation.
        holder.bind(("", port))
    except OSError:
        holder.close()
        return False
    stack.enter_context(holder)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return True
