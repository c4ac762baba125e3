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

import psutil

from ..errors import DistBackendError, DistStoreTimeoutError
from ..stores.base import Store
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
        channel: socket.socket,
        on_error: Callable[[str], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
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
        self._store.set(f"host/{self._rank}", json.dumps(_own_host()))
        hosts = [self._get(f"host/{rank}") for rank in range(self._size)]
        if self._stopped.is_set():
            return
        self._channel.send(choose_address([json.loads(h) for h in hosts], self._rank))
        while request := self._channel.recv(MESSAGE_BYTES):
            verb, key, value = request.split(b"\0", 2)
            name = f"mesh/{key.decode()}"
            if verb == b"set":
                self._store.set(name, value)
            else:
                answer = self._get(name)
                if self._stopped.is_set():
                    return
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
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    # Containers on one machine share its boot id but not its loopback.
    network = os.stat("/proc/self/ns/net").st_ino
    return {"machine": f"{boot}/{network}", "address": _own_address()}


def _own_address() -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        found = psutil.net_if_addrs().get(interface, [])
        for family in (socket.AF_INET, socket.AF_INET6):
            for address in found:
                if address.family == family:
                    return address.address
        raise DistBackendError(
            f"GLOO_SOCKET_IFNAME names {interface!r}, which has no address here; "
            f"there are {', '.join(sorted(psutil.net_if_addrs()))}"
        )
    return _address_towards(os.environ.get("MASTER_ADDR", "")) or "127.0.0.1"


def _address_towards(host: str) -> str | None:
    """Return the local address of the route to `host`, if it leaves this machine."""
    # Connecting a datagram socket sends nothing. A documentation address stands
    # for "anywhere else".
    for target in (host, "192.0.2.1"):
        try:
            family, kind, _, _, peer = socket.getaddrinfo(
                target, 9, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(peer)
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if address != "::1" and not address.startswith("127."):
            return address
    return None


def choose_address(hosts: Sequence[dict[str, str]], rank: int) -> bytes:
    """Return where the side process of `rank` listens: loopback if all share a host."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return hosts[rank]["address"].encode()
    if len({host["machine"] for host in hosts}) == 1:
        return b"127.0.0.1"
    return hosts[rank]["address"].encode()
