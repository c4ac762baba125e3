"""How side processes find each other: through the store of the group.

A side process has no store of its own. Its rank reads its requests from a
socket and answers them, on a thread that lives until the side process is
connected to all its peers.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Sequence

from ..errors import DistBackendError, DistStoreTimeoutError
from ..messaging.network import own_address
from ..rank_sets import name_ranks
from ..stores.base import Store
from ..stores.process_end import host_id
from .side.wire import MESSAGE_BYTES

__all__ = ["Rendezvous"]

# Seconds that the thread may live on after its side process was killed.
_SLICE = 0.25


class Rendezvous:
    """Serves one side process until it is connected to all peers, or dead."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        library: str,
        channel: socket.socket,
        on_error: Callable[[str], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._library = library
        self._published: dict[bytes, bytes] = {}
        self._channel = channel
        self._on_error = on_error
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="rankscope-gloo-rendezvous", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread: the side process is gone."""
        self._stopped.set()

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread is not threading.current_thread():
            self._thread.join(4 * _SLICE)

    @property
    def addresses(self) -> dict[int, bytes]:
        """What each peer published of its addresses: to listen on, and connected."""
        peers = [rank for rank in range(self._size) if rank != self._rank]
        return {
            peer: b"".join(
                self._published.get(key % peer, b"") for key in (b"%d", b"ends/%d")
            )
            for peer in peers
        }

    def _run(self) -> None:
        try:
            with self._channel:
                self._serve()
        except OSError:
            return  # killed while it was being answered; its caller reports why
        except Exception as error:  # noqa: BLE001 - it is reported to the group
            if not self._stopped.is_set():
                self._on_error(f"rendezvous of gloo failed: {error}")

    def _serve(self) -> None:
        own = {**_own_host(), "library": self._library}
        self._store.set(f"host/{self._rank}", json.dumps(own))
        answers = [self._get(f"host/{rank}") for rank in range(self._size)]
        if self._stopped.is_set():
            return
        hosts = [json.loads(answer) for answer in answers]
        check_libraries([host["library"] for host in hosts])
        self._channel.send(choose_address(hosts, self._rank))
        while request := self._channel.recv(MESSAGE_BYTES):
            verb, key, value = request.split(b"\0", 2)
            name = f"mesh/{key.decode()}"
            if verb == b"set":
                self._store.set(name, value)
            else:
                answer = self._get(name)
                if self._stopped.is_set():
                    return
                self._published[key] = answer
                self._channel.send(b"=" + answer)

    def _get(self, key: str) -> bytes:
        # Without a deadline: the dispatcher keeps those, and aborts.
        while not self._stopped.is_set():
            try:
                return self._store.get(key, timeout=_SLICE)
            except DistStoreTimeoutError:
                continue
        return b""


def _own_host() -> dict[str, str]:
    """Return an id of this machine, and an address at which others reach it."""
    # Ranks share a loopback in one network namespace only.
    return {"machine": host_id("net"), "address": own_address()}


def check_libraries(libraries: Sequence[str]) -> None:
    """Raise `DistBackendError` if the ranks use different libraries (by rank)."""
    # They have no transport in common: the ranks would wait for each other for ever.
    if len(set(libraries)) > 1:
        users = {
            library: name_ranks(
                rank for rank, other in enumerate(libraries) if other == library
            )
            for library in sorted(set(libraries))
        }
        raise DistBackendError(
            "the ranks of the group use different gloo libraries: "
            + "; ".join(f"{ranks}: {library}" for library, ranks in users.items())
            + ". Install the same one for all, or set RANKSCOPE_GLOO on every rank"
        )


def choose_address(hosts: Sequence[dict[str, str]], rank: int) -> bytes:
    """Return where the side process of `rank` listens: loopback if all share a host."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return hosts[rank]["address"].encode()
    if len({host["machine"] for host in hosts}) == 1:
        return b"127.0.0.1"
    return hosts[rank]["address"].encode()
