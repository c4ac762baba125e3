"""ValuePort: large values to and from a rank, over a connection of their own.

The notebook listens while a push or a pull runs, and the ranks connect: the bytes do
not go through ipyparallel's controller, as messages do. The rank gets the key of this
push or pull with the request, and both ends prove by the handshake of the tcp backend
that they have it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.backends.tcp.encryption import encrypt
from rankscope.backends.tcp.handshake import greet

__all__ = [
    "PATIENCE",
    "STALL",
    "ValuePort",
    "receive_frames",
    "receive_value",
    "send_frames",
]

#: Seconds in which a connection is made, and both ends have proved themselves.
PATIENCE = 2.0
#: Seconds without a byte after which a connection is given up.
STALL = 30.0
#: Seconds in which a host that has not answered is not called again.
FORGET = 600.0

#: Bytes of a call of the system, each of which has the deadline `STALL`.
_CHUNK = 1 << 20
_NUMBER = struct.Struct("<Q")

#: Hosts that have not answered, and when: what a firewall drops.
_silent: dict[str, float] = {}


@dataclass(frozen=True)
class ValuePort:
    """Where the notebook waits for the ranks of one push or pull."""

    host: str
    port: int
    key: bytes
    encrypted: bool
    #: Those of the frames that are pushed.
    lengths: list[int]

    def receive(self) -> list[Any] | None:
        """Return the frames that are pushed; ``None``: the port is out of reach."""
        sock = self._connect(0)
        if sock is None:
            return None
        with contextlib.closing(sock), _named_errors():
            return receive_frames(sock, self.lengths)

    def send(self, frames: Sequence[Any]) -> int | None:
        """Send frames that are pulled; return their number, ``None``: out of reach."""
        number = secrets.randbits(31)
        sock = self._connect(number)
        if sock is None:
            return None
        with contextlib.closing(sock), _named_errors():
            lengths = [memoryview(frame).nbytes for frame in frames]
            head = [_NUMBER.pack(one) for one in (len(lengths), *lengths)]
            send_frames(sock, [b"".join(head), *frames])
            # The notebook has everything.
            receive_frames(sock, [1])
        return number

    def _connect(self, number: int) -> Any:
        """Return a socket to the notebook; ``None`` where messages have to do."""
        if time.monotonic() < _silent.get(self.host, -FORGET) + FORGET:
            return None
        try:
            sock = socket.create_connection((self.host, self.port), PATIENCE)
        except TimeoutError:
            _silent[self.host] = time.monotonic()
            return None
        except OSError:
            return None
        try:
            greet(sock, number, self.key)
            sock.settimeout(STALL)
            return encrypt(sock, False, self.key) if self.encrypted else sock
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                return None  # somebody else's port, or it is closed by now
            raise


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectionError(
            f"the connection to the notebook was lost amid the value: {error}"
        ) from error


def receive_value(sock: Any, begin: Callable[[int], None], note: Any) -> list[Any]:
    """Return the frames that `ValuePort.send` sends; `begin` gets their bytes."""
    [count] = _numbers(sock, 1)
    lengths = _numbers(sock, count)
    begin(sum(lengths))
    return receive_frames(sock, lengths, note)


def _numbers(sock: Any, count: int) -> list[int]:
    [data] = receive_frames(sock, [count * _NUMBER.size])
    return [number for (number,) in _NUMBER.iter_unpack(data)]


def send_frames(
    sock: Any, frames: Sequence[Any], note: Callable[[int], None] = lambda count: None
) -> None:
    """Send `frames`; `note` gets the number of bytes of each step."""
    for frame in frames:
        view = memoryview(frame).cast("B")
        while view:
            count = sock.sendmsg([view[:_CHUNK]])
            note(count)
            view = view[count:]


def receive_frames(
    sock: Any, lengths: Sequence[int], note: Callable[[int], None] = lambda count: None
) -> list[Any]:
    """Return frames of these `lengths`; as `send_frames`."""
    frames: list[Any] = []
    for length in lengths:
        # A large bytearray is filled with zeros first, with the GIL held for seconds.
        large = length > _CHUNK
        frame: Any = np.empty(length, np.uint8) if large else bytearray(length)
        view = memoryview(frame)
        while view:
            count = sock.recv_into(view[:_CHUNK])
            if not count:
                raise ConnectionResetError("the other end closed it")
            note(count)
            view = view[count:]
        frames.append(frame)
    return frames
