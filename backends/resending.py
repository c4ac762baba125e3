"""How soon a connection goes on after the network was cut, and is there again."""

from __future__ import annotations

import contextlib
import socket
import sys

__all__ = ["resend_each_second"]

#: Of linux/tcp.h, since Linux 6.15: the longest time between two attempts, in ms.
_TCP_RTO_MAX_MS = 44
#: Milliseconds without an answer after which the kernel ends the connection. They are
#: its default where it tries ever less often; else it would count the attempts.
_GIVES_UP = 924_000


def resend_each_second(descriptor: int) -> None:
    """Have the kernel send anew each second what a TCP connection gets no answer to.

    It waits for twice as long each time, up to two minutes: after a cut of 30 s the
    connection would stay silent for up to 30 s more. Before Linux 6.15, it does.
    """
    if sys.platform != "linux":
        return
    # The owner of the descriptor may have closed it, which is no error here.
    with contextlib.suppress(OSError):
        made = socket.socket(fileno=descriptor)
        try:
            made.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVES_UP)
        finally:
            made.detach()
