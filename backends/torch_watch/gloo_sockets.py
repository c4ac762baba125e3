"""The TCP sockets of torch's gloo backends in this process, found and shut down.

Each gloo backend of torch has an event loop of its own: an epoll instance that waits
for one listening socket and for the connections to the other ranks. The rank has
published the address of the listening socket in the group's store. So the loop of a
group is found without a guess, whatever other threads open at the same time, and its
connections are those that the kernel lists for the loop at the time of the abort. No
descriptor is kept: a number may by then belong to another file.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["count_connections", "duplicate", "listening_sockets", "shut_down"]

_DESCRIPTORS = Path("/proc/self/fd")
_DETAILS = Path("/proc/self/fdinfo")
_EPOLL = "anon_inode:[eventpoll]"


def listening_sockets(published: Iterable[bytes]) -> frozenset[int]:
    """Return the inodes of the listening sockets whose addresses are `published`.

    Each of `published` is the value that gloo wrote to a store: it contains the
    address as the C library has it (``struct sockaddr``).
    """
    values = list(published)
    found = set()
    for loop in _event_loops():
        for descriptor, inode in loop.items():
            with duplicate(descriptor, inode) as copy:
                if copy is None or not _listens(copy):
                    continue
                address = _address(copy)
                if address and any(address in value for value in values):
                    found.add(inode)
    return frozenset(found)


def _connections(listeners: Iterable[int]) -> Iterator[socket.socket]:
    """Yield a copy of each connection of the event loops that wait for `listeners`."""
    wanted = set(listeners)
    for loop in _event_loops():
        if wanted.isdisjoint(loop.values()):
            continue
        for descriptor, inode in loop.items():
            with duplicate(descriptor, inode) as copy:
                if copy is not None and not _listens(copy):
                    yield copy


def count_connections(listeners: Iterable[int]) -> int:
    """Return how many connections the event loops that wait for `listeners` have.

    One that the other end has closed does not count, whether gloo has noticed or not.
    """
    return sum(map(_is_open, _connections(listeners)))


def _is_open(connection: socket.socket) -> bool:
    """Whether the other end has not closed the connection, as far as is known here."""
    try:
        # What gloo is to read stays there.
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def shut_down(listeners: Iterable[int]) -> int:
    """Shut down the connections of the event loops that wait for `listeners`.

    Both ends see an end of file at once. The descriptors stay open: gloo closes them.
    Returns the number of connections.
    """
    ended = 0
    for connection in _connections(listeners):
        # Else the other end was faster.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
            ended += 1
    return ended


def _event_loops() -> Iterator[dict[int, int]]:
    """Yield, for each epoll instance, the inodes of what it waits for by descriptor."""
    for entry in os.listdir(_DESCRIPTORS):
        try:
            if os.readlink(_DESCRIPTORS / entry) != _EPOLL:
                continue
            details = (_DETAILS / entry).read_text()
        except FileNotFoundError:
            # Closed since the folder was read.
            continue
        yield {
            int(fields[1]): int(fields[-2].removeprefix("ino:"), 16)
            for fields in map(str.split, details.splitlines())
            if fields and fields[0] == "tfd:"
        }


@contextlib.contextmanager
def duplicate(
    descriptor: int, inode: int | None = None
) -> Iterator[socket.socket | None]:
    """Yield a socket on a copy of `descriptor`; ``None``: it is none, of this `inode`.

    A copy, since gloo's thread may close the descriptor, and another thread open the
    same number, at any time.
    """
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    status = os.fstat(copy)
    if inode not in (None, status.st_ino) or not stat.S_ISSOCK(status.st_mode):
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as made:
        yield made


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(one: socket.socket) -> bytes:
    """Return the part of the socket's ``sockaddr`` that is its own."""
    family = int(one.family).to_bytes(2, "little")
    if one.family == socket.AF_INET:
        host, port = one.getsockname()
        return family + port.to_bytes(2, "big") + socket.inet_aton(host)
    if one.family == socket.AF_INET6:
        host, port = one.getsockname()[:2]
        # Between port and address lies the flow label, which may differ.
        return family + port.to_bytes(2, "big")
    return b""
