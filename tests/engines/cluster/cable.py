"""A cable between two network namespaces: it delays, loses, is slow, or cut.

Not a veth pair with ``tc netem``: many a kernel comes without netem. Two TUN
devices do, and what goes from one to the other passes through this process.
"""

from __future__ import annotations

import fcntl
import math
import os
import random
import select
import socket
import struct
import threading
import time
from collections import deque

__all__ = ["TUN", "Cable"]

TUN = "/dev/net/tun"

_SET_INTERFACE = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_PACKET = 65536
_SYN, _ACK = 0x02, 0x10


class Cable:
    """Joins the devices ``cable-a`` and ``cable-b``, both made in this namespace.

    `delay` in seconds and `loss` as a share hold for each direction, `rate` in bytes a
    second for what goes to ``cable-b``; with ``up`` false nothing gets through, and
    neither side gets an error.
    """

    def __init__(self) -> None:
        self.delay = self.loss = 0.0
        self.rate = math.inf
        self._free = 0.0
        #: Of a firewall at ``cable-a`` or ``cable-b``: the ports at which it lets
        #: connections in. It drops the first packet of others.
        self.admitted: dict[str, set[int]] = {}
        self.up = True
        self.carried = self.lost = 0
        self._ends = [_device(b"cable-a"), _device(b"cable-b")]
        # End to write to → packets in order, each with the time it is due.
        self._under_way: dict[int, deque[tuple[float, bytes]]] = {
            end: deque() for end in self._ends
        }
        self._random = random.Random(0)
        self._closed = False
        self._thread = threading.Thread(target=self._carry, name="cable", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove both devices."""
        self._closed = True
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        there = dict(zip(self._ends, reversed(self._ends), strict=True))
        while not self._closed:
            due = [queue[0][0] for queue in self._under_way.values() if queue]
            wait = min([0.1, *(max(0.0, at - time.monotonic()) for at in due)])
            for end in select.select(self._ends, [], [], wait)[0]:
                packet = os.read(end, _PACKET)
                if (
                    not self.up
                    or self._random.random() < self.loss
                    or self._is_refused(end, packet)
                ):
                    self.lost += 1
                    continue
                at = time.monotonic() + self.delay
                if end == self._ends[0] and self.rate < math.inf:
                    at = self._free = max(at, self._free) + len(packet) / self.rate
                self._under_way[there[end]].append((at, packet))
            now = time.monotonic()
            for end, queue in self._under_way.items():
                while queue and queue[0][0] <= now:
                    self._deliver(end, queue.popleft()[1])

    def _is_refused(self, end: int, packet: bytes) -> bool:
        to = "cable-b" if end == self._ends[0] else "cable-a"
        if to not in self.admitted or packet[9] != socket.IPPROTO_TCP:
            return False
        segment = packet[4 * (packet[0] & 15) :]
        opens = segment[13] & (_SYN | _ACK) == _SYN
        return opens and int.from_bytes(segment[2:4]) not in self.admitted[to]

    def _deliver(self, end: int, packet: bytes) -> None:
        try:
            os.write(end, packet)
            self.carried += 1
        except OSError:
            # The device is not up yet, or its queue is full: a lost packet.
            self.lost += 1


def _device(name: bytes) -> int:
    tun = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
    request = struct.pack("16sH22x", name, _TUN_WITHOUT_HEADER)
    fcntl.ioctl(tun, _SET_INTERFACE, request)
    return tun
