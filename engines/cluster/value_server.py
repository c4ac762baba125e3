"""ValueServer: the notebook's end of the connections for large values."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from rankscope.backends.errors import DistBackendError
from rankscope.backends.messaging.connecting import own_address
from rankscope.backends.tcp.encryption import encrypt
from rankscope.backends.tcp.handshake import KEY_SIZE, Accepting
from rankscope.backends.thread_start import start_thread

from ..wire.value_port import PATIENCE, STALL, ValuePort, receive_value, send_frames

__all__ = ["ValueServer"]

# Connections that have not proved themselves, beside the expected ones: strangers.
_STRANGERS = 16
# Have a socket that is closed end its connection at once: linger for 0 seconds.
_RESET = struct.pack("ii", 1, 0)
# Seconds between two looks whether it is closed, where a shutdown wakes no `accept`.
_LOOK = 1.0


class ValueServer:
    """Moves the values of one push (of `frames`) or pull with `size` ranks."""

    def __init__(
        self,
        address: str,
        size: int,
        encrypted: bool,
        frames: Sequence[Any] | None = None,
    ) -> None:
        self._frames, self._most = frames, size + _STRANGERS
        lengths = [memoryview(one).nbytes for one in frames or ()]
        #: Bytes that have gone, and all that are known of.
        self.moved, self.total = 0, size * sum(lengths)
        #: The frames that ranks have sent, by the number that they return.
        self.received: dict[int, list[Any]] = {}
        self._lack: MemoryError | None = None
        self._lock = threading.Lock()
        self._closed = False
        # The other names of the sockets, by which `close` ends them: a shutdown of a
        # TLS socket would have its thread go on without TLS.
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(
            (address, 0),
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            backlog=self._most,
        )
        self._listener.settimeout(_LOOK)
        #: What the ranks are to have.
        self.port = ValuePort(
            address,
            self._listener.getsockname()[1],
            secrets.token_bytes(KEY_SIZE),
            encrypted,
            lengths,
        )
        self._accepting = start_thread("values", self._accept)

    @classmethod
    def towards(
        cls, host: str, size: int, encrypted: bool, frames: Sequence[Any] | None = None
    ) -> ValueServer | None:
        """Return a server that `host` can reach; ``None`` where there can be none."""
        try:
            # A rank that is known by a loopback address is here, or behind a tunnel.
            local = host.startswith("127.")
            address = "127.0.0.1" if local else own_address(host=host)
            return cls(address, size, encrypted, frames)
        except (OSError, DistBackendError):
            return None

    def check(self) -> None:
        if self._lack is not None:
            raise self._lack

    def close(self) -> None:
        """End everything, also what is under way."""
        self._closed = True
        with contextlib.suppress(OSError):  # no connection, where it wakes nobody
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(STALL)
        self._listener.close()
        with self._lock:
            for end in self._ends:
                with contextlib.suppress(OSError):  # the other end was faster
                    # Else a rank that has filled the buffers is not told of the end.
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(STALL)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # it is closed, or has no descriptor: messages reach the ranks
            with self._lock:
                if len(self._ends) >= self._most:
                    sock.close()
                    continue
                end = sock.dup()
                self._ends.add(end)
            self._threads.append(start_thread("values", self._serve, sock, end))

    def _serve(self, sock: Any, end: socket.socket) -> None:
        """Move the value of the rank at the other end, once that has proved itself."""
        try:
            accepting = Accepting(sock, self.port.key)
            sock.settimeout(PATIENCE)
            while (number := accepting.advance()) is None:
                pass  # a part of the proof has come
            sock.settimeout(STALL)
            if self.port.encrypted:
                sock = encrypt(sock, True, self.port.key)
            if self._frames is None:
                self.received[number] = receive_value(sock, self._expect, self._note)
                send_frames(sock, [b"\0"])
            else:
                send_frames(sock, self._frames, self._note)
        except MemoryError as error:
            self._lack = error
        except OSError:
            pass  # a stranger, or a rank, which says itself what it has lost
        finally:
            with self._lock:
                self._ends.discard(end)
                end.close()
            sock.close()

    def _expect(self, count: int) -> None:
        with self._lock:
            self.total += count

    def _note(self, count: int) -> None:
        with self._lock:
            self.moved += count
