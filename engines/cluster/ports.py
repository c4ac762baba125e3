"""Ports for a controller: free, and not among those of outgoing connections."""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_ports"]

#: The first port that is tried: services have the numbers below it.
FIRST = 20_000
#: The file with the range of the ports that the system gives to connections.
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return `count` ports at which a server can listen a moment later.

    By itself a controller chooses free ports of the range that connections get theirs
    from, closes them, and listens seconds later: on a busy machine a connection may
    have got one by then. An empty list: there are too few ports below that range.
    """
    last = int(EPHEMERAL.read_text().split()[0])
    candidates = range(FIRST, last)
    if len(candidates) < 10 * count:
        return []
    found: list[int] = []
    # Not by the generator of the user: programs with one seed would choose the same
    # ports at the same time, and what the user draws afterwards would change.
    for port in random.SystemRandom().sample(candidates, 10 * count):
        with socket.socket() as probe:
            try:
                # On all addresses, as a controller may listen.
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    return []
