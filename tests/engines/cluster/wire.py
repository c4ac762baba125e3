"""A wire between a notebook and its controller that can be cut, or go silent.

It stands between the two for every port of the connection file, as an ssh
tunnel does.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Wire"]

_PORTS = ("registration", "control", "mux", "task", "iopub", "notification")
_PIECE = 1 << 16


class Wire:
    """Forwards TCP connections to the controller that `connection_file` names.

    `file` is the connection file to give the client instead.
    """

    def __init__(self, connection_file: Path, folder: Path) -> None:
        info: dict[str, Any] = json.loads(connection_file.read_text())
        host = info["interface"].partition("://")[2]
        self._selector = selectors.DefaultSelector()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._silent = False
        self._refusing = False
        self._closed = False
        for name in (*_PORTS, "broadcast"):
            if name in info:
                info[name] = self._listen(host, info[name])
        # Of the same name: it carries the cluster's id.
        self.file = folder / connection_file.name
        self.file.write_text(json.dumps(info))
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._thread.start()

    def _listen(self, host: str, port: int) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        self._selector.register(listener, selectors.EVENT_READ, (host, port))
        return listener.getsockname()[1]

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def silence(self) -> None:
        """Drop every packet from now on; neither side gets an error."""
        self._silent = True

    def cut(self) -> None:
        """End every connection, for both sides to see; let none be made."""
        with self._lock:
            self._refusing = True
            for one in list(self._pairs):
                self._drop(one)

    def mend(self) -> None:
        """Carry what comes, and what waited; let connections be made again."""
        self._silent = self._refusing = False

    def _run(self) -> None:
        while not self._closed:
            ready = [] if self._silent else self._selector.select(0.05)
            if self._silent:
                threading.Event().wait(0.05)
            for key, _ in ready:
                with self._lock:
                    assert isinstance(key.fileobj, socket.socket)
                    if key.data is not None:
                        self._accept(key.fileobj, key.data)
                    elif key.fileobj in self._pairs:
                        self._carry(key.fileobj)

    def _accept(self, listener: socket.socket, where: tuple[str, int]) -> None:
        here, _ = listener.accept()
        if self._refusing:
            here.close()
            return
        there = socket.create_connection(where)
        for one, other in ((here, there), (there, here)):
            self._pairs[one] = other
            self._selector.register(one, selectors.EVENT_READ, None)

    def _carry(self, one: socket.socket) -> None:
        try:
            piece = one.recv(_PIECE)
            if piece:
                self._pairs[one].sendall(piece)
                return
        except OSError:
            # One of the two ended in the middle: so does the other.
            pass
        self._drop(one)

    def _drop(self, one: socket.socket) -> None:
        other = self._pairs.get(one)
        for end in (one, other):
            if end is not None and self._pairs.pop(end, None) is not None:
                self._selector.unregister(end)
                end.close()
