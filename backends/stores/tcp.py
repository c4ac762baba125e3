"""TCPStore: an authenticated key-value server in rank 0, and its clients."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

from ..errors import DistNetworkTimeoutError, DistStoreError, DistStoreTimeoutError
from ..quantities import as_int
from .base import DEFAULT_TIMEOUT, RANK_0, Store, remaining, to_bytes
from .process_end import own_process
from .tcp_client import TCPStoreClient
from .tcp_keys import curve_keys, shared_key
from .tcp_server import TCPStoreServer

__all__ = ["TCPStore"]

# Keys that exist while the master waits for the others.
_COME, _ALL_HERE = "tcp-store/connected", "tcp-store/all connected"

# Seconds within which a running server answers a request that does not wait.
_GRACE = 5.0


class TCPStore(Store):
    """A store served over TCP by the process that has ``is_master=True``.

    Parameters
    ----------
    host_name : str
        The name or address of the master, which listens on that address alone.
    port : int
        Its port; with 0 the master picks a free port, which the attribute `port` holds.
    world_size : int, optional
        The number of expected ranks, the master one of them. With it, the master waits
        here until as many stores are connected.
    is_master : bool, default False
        Whether this process serves the keys.
    timeout : float or timedelta, default 300
        Bounds the connection set-up, and is the default of every wait; in seconds if it
        is a number.
    wait_for_workers : bool, default True
        Whether the master waits for the others; the same on every rank.
    multi_tenant, master_listen_fd : optional
        ``False`` and ``None``: another store in this process cannot share the server,
        which opens its socket itself.
    use_libuv : bool, default True
        Not used: accepted for c10d's signature. The server stands on ZeroMQ.
    key : bytes, optional
        The secret of the group: a process without it can neither read nor write.
        ``None`` is that of ``RANKSCOPE_KEY``, or else one that all processes of this
        user share.
    reports_deaths : bool, default False
        Whether last wills are published and the loss of the master is reported; the
        same on every rank.
    server : str, default "rank 0"
        What the process that serves the keys is, in messages.

    Raises
    ------
    DistNetworkError
        The master cannot listen, or, at once, its key differs.
    DistNetworkTimeoutError
        No store answers within `timeout`.
    DistStoreTimeoutError
        Not all ranks came to the master within `timeout`.
    ValueError
        A port that cannot be, `multi_tenant` or `master_listen_fd`.

    Notes
    -----
    Named after ``torch.distributed.TCPStore``, with which it shares the methods, and
    not the protocol: it goes over ZeroMQ, authenticated and encrypted. When the master
    ends, every wait and later call raises `DistNetworkError`; while its process is
    stopped, a call raises `DistNetworkTimeoutError`, and may be repeated.

    Examples
    --------
    >>> master = dist.TCPStore("127.0.0.1", 0, is_master=True, key=b"secret")
    >>> client = dist.TCPStore("127.0.0.1", master.port, key=b"secret")
    >>> master.set("key", "value")
    >>> client.get("key")
    b'value'
    >>> client.close(), master.close()
    (None, None)
    """

    #: Where the master listens.
    host: str
    port: int

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        key: bytes | None = None,
        reports_deaths: bool = False,
        server: str = RANK_0,
    ) -> None:
        port = as_int(port, "TCPStore: port")
        if multi_tenant:
            raise ValueError(
                "TCPStore: multi_tenant is True; expected False: make one store, and a "
                "PrefixStore on it for each of its users"
            )
        if master_listen_fd is not None:
            raise ValueError(
                f"TCPStore: master_listen_fd is {master_listen_fd!r}; expected None: "
                "the master opens its socket itself; port=0 picks a free port"
            )
        if not 0 <= port <= 65535 or (port == 0 and not is_master):
            raise ValueError(
                f"port {port}: expected 1-65535 (0, any free one, for the master only)"
            )
        if world_size is not None:
            world_size = as_int(world_size, "TCPStore: world_size")
        self.host = host_name
        self.world_size = world_size
        self.is_master = is_master
        self._reports_deaths = reports_deaths
        self.server = server
        self.timeout = timeout
        self._key = shared_key() if key is None else key
        keys = curve_keys(self._key)
        self._server = TCPStoreServer(host_name, port, keys) if is_master else None
        self.port = self._server.port if self._server else port
        self._client: TCPStoreClient | None = None
        deadline = time.monotonic() + self._timeout
        try:
            served_by = (0,) if reports_deaths and server == RANK_0 else ()
            self._client = TCPStoreClient(host_name, self.port, keys, server, served_by)
            self._client.connect(self._timeout)
            if reports_deaths:
                # Both sides report how the process of the other one ended.
                self._client.watch_server(self._call(b"process", own_process())[0])
                # From now on the master sends its goodbye to this client as well.
                self._call(b"will")
            if wait_for_workers and world_size is not None and world_size > 0:
                self._join(world_size, deadline)
        except BaseException:
            _close(self._client, self._server)
            raise
        # Threads refer to client and server, never to the store, so that a store
        # without close() is collected; it is closed here, at the latest at exit.
        self._finalizer = weakref.finalize(self, _close, self._client, self._server)
        _stores.add(self)

    def _join(self, world_size: int, deadline: float) -> None:
        """Count this process in; as the master, wait until all have come."""
        come = self.add(_COME, 1)
        if come == world_size:
            self.set(_ALL_HERE, b"")
        if not self.is_master:
            return
        met, _ = self._await(b"get", [_ALL_HERE.encode()], remaining(deadline))
        if not met:
            raise DistStoreTimeoutError(
                f"TCPStore: {self.add(_COME, 0)} of {world_size} processes connected "
                f"to {self.host}:{self.port} within {self._timeout:g} s"
            )
        # What is left are the callers' own keys.
        self.delete_key(_COME)
        self.delete_key(_ALL_HERE)

    def clone(self) -> TCPStore:
        """Return another connection to the same master, which must outlive it."""
        return TCPStore(
            self.host,
            self.port,
            self.world_size,
            timeout=self._timeout,
            wait_for_workers=False,
            key=self._key,
            reports_deaths=self._reports_deaths,
            server=self.server,
        )

    def _watch(
        self, names: Sequence[bytes], callback: Callable[[Sequence[bytes]], None]
    ) -> Callable[[], None]:
        client = self._connected()
        request = client.submit(b"get", names, callback)
        return lambda: client.drop(request)

    def last_will(self, key: str, value: bytes | str) -> bool:
        if self._reports_deaths:
            self._call(b"will", key.encode(), to_bytes(value))
        return self._reports_deaths

    def withdraw(self) -> None:
        if self._reports_deaths:
            self._call(b"unwill")
        if self._server is not None:
            self._server.orderly = True

    def watch_loss(self, callback: Callable[[str], None]) -> Callable[[], None]:
        if not self._reports_deaths:
            return lambda: None
        return self._connected().watch_loss(callback)

    def no_answer(self) -> DistNetworkTimeoutError | None:
        return None if self._client is None else self._client.no_answer()

    @property
    def lost(self) -> bool:
        """Whether every call raises from now on: closed, or the connection is lost.

        A lost connection is not restored: make another store.
        """
        return self._client is None or self._client.ended

    def close(self) -> None:
        if self._finalizer.alive:
            _close(self._client, self._server)

    def _connected(self) -> TCPStoreClient:
        if self._client is None:
            raise DistStoreError("the TCP store was never connected")
        return self._client

    def _call(self, op: bytes, *args: bytes) -> list[bytes]:
        client = self._connected()
        request = client.submit(op, args)
        try:
            if not request.done.wait(max(self._timeout, _GRACE)):
                raise client.no_answer()
        finally:
            client.forget(request)
        return request.result()

    def _await(
        self, op: bytes, names: Sequence[bytes], limit: float
    ) -> tuple[bool, list[bytes]]:
        client = self._connected()
        request = client.submit(op, names)
        try:
            if not request.done.wait(limit):
                # The server answers a dropped request with the missing keys.
                client.send_drop(request)
                if not request.done.wait(_GRACE):
                    raise client.no_answer()
        except BaseException:
            client.drop(request)
            raise
        client.forget(request)
        if request.status == b"missing":
            return False, request.payload
        return True, request.result()

    def __repr__(self) -> str:
        role = "master" if self.is_master else "client"
        ranks = "" if self.world_size is None else f", {self.world_size} ranks"
        return f"<TCPStore {self.host}:{self.port} {role}{ranks}>"


# Those of this process.
_stores: weakref.WeakSet[TCPStore] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: the parent uses the sockets."""
    for store in list(_stores):
        if store._client is not None:
            store._finalizer.detach()
            store._client.disown()


os.register_at_fork(after_in_child=_leave_to_parent)


def _close(client: TCPStoreClient | None, server: TCPStoreServer | None) -> None:
    if client is not None:
        client.close()
    if server is not None:
        server.close()
