"""A backend over TCP sockets, which notices at once that a peer closed its own.

Slow and small: what matters is that the death of a rank reaches the others through
their sockets before the store or the launcher has reported it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import rankscope as dist
from rankscope import OpType, ReduceOp, Work

__all__ = ["SocketBackend", "register"]

_CONNECT_SECONDS = 30.0


class SocketBackend(dist.Backend):
    """Every rank sends to every other one; ops run on one thread."""

    name = "sockets"
    reduce_ops = frozenset({ReduceOp.SUM})

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="socket-backend")
        self._peers = _connected(store, rank, size)

    def all_reduce(self, tensor: Any, op: ReduceOp) -> Work:
        def run() -> None:
            tensor[...] = sum(
                np.frombuffer(part, tensor.dtype).reshape(tensor.shape)
                for part in self._exchange(tensor.tobytes())
            )

        return dist.create_work_from_call(self._thread, run, op_type=OpType.ALL_REDUCE)

    def barrier(self) -> Work:
        return dist.create_work_from_call(
            self._thread, lambda: self._exchange(b""), op_type=OpType.BARRIER
        )

    def _exchange(self, mine: bytes) -> Sequence[bytes]:
        """Return what all ranks send, in the order of ranks."""
        came = {self.rank: mine}
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._peers.items():
                with _loss_of(peer):
                    connection.sendall(struct.pack("=I", len(mine)) + mine)
                selector.register(connection, selectors.EVENT_READ, peer)
            while len(came) < self.size:
                # Whichever comes first: the end of a connection does, too.
                for key, _ in selector.select():
                    with _loss_of(key.data):
                        (size,) = struct.unpack("=I", _receive(key.fileobj, 4))
                        came[key.data] = _receive(key.fileobj, size)
                    selector.unregister(key.fileobj)
        return [came[rank] for rank in range(self.size)]

    def abort(self, reason: str) -> None:
        for connection in self._peers.values():
            # A thread that waits for the socket is to return.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.shutdown(wait=False)
        self._close()

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._close()

    def _close(self) -> None:
        for connection in self._peers.values():
            connection.close()


def _connected(store: dist.Store, rank: int, size: int) -> dict[int, socket.socket]:
    """Connect to every other rank: to the lower ones, from the higher ones."""
    peers: dict[int, socket.socket] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_CONNECT_SECONDS)
        store.set(f"port/{rank}", str(server.getsockname()[1]))
        for lower in range(rank):
            port = int(store.get(f"port/{lower}", _CONNECT_SECONDS))
            peers[lower] = socket.create_connection(("127.0.0.1", port))
            peers[lower].sendall(struct.pack("=I", rank))
        for _ in range(rank + 1, size):
            connection, _ = server.accept()
            connection.settimeout(None)
            (higher,) = struct.unpack("=I", _receive(connection, 4))
            peers[higher] = connection
    return peers


@contextlib.contextmanager
def _loss_of(peer: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise dist.ConnectionLostError(error, peer=peer) from error


def _receive(connection: Any, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part: bytes = connection.recv(size - len(received))
        if not part:
            raise ConnectionResetError("closed by the peer")
        received += part
    return received


def register() -> None:
    """Make the backend known as ``sockets``."""
    dist.Backend.register_backend("sockets", SocketBackend, devices="cpu")
