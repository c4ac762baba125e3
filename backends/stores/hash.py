"""HashStore: the keys of one process, for ranks that are its threads."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

from ..errors import DistStoreError
from .base import DEFAULT_TIMEOUT, Store, remaining
from .key_table import KeyTable, Ticket

__all__ = ["HashStore"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Wait:
    """A request that waits for its keys, and its answer."""

    callback: Callable[[Sequence[bytes]], object] | None = None
    done: threading.Event = field(default_factory=threading.Event)
    status: bytes = b""
    payload: Sequence[bytes] = ()


class _Shared:
    """What a store and its clones have in common; used with the lock held."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.table = KeyTable(self._answer)
        self.waits: dict[Ticket, _Wait] = {}
        self.clients = itertools.count()

    def drop(self, ticket: Ticket) -> None:
        """Give up a request; without an answer yet, it gets the keys it misses."""
        self.table.handle(ticket, b"drop", [ticket[1]])

    def _answer(self, ticket: Ticket, status: bytes, payload: Sequence[bytes]) -> None:
        wait = self.waits.pop(ticket)
        wait.status, wait.payload = status, payload
        wait.done.set()
        if wait.callback is not None and status == b"ok":
            wait.callback(payload)


class HashStore(Store):
    """A store in the memory of this process, for ranks that are its threads.

    Named after ``torch.distributed.HashStore``. `clone` returns a store of the same
    keys that is closed by itself: each thread that is a rank has its own.

    Parameters
    ----------
    timeout : float or timedelta, default 300
        The default of every wait, in seconds if it is a number.

    Examples
    --------
    >>> store = dist.HashStore(timeout=5)
    >>> other = store.clone()
    >>> other.set("key", "value")
    >>> store.get("key")
    b'value'
    """

    def __init__(self, timeout: float | timedelta = DEFAULT_TIMEOUT) -> None:
        self.timeout = timeout
        self._open_on(_Shared())

    def _open_on(self, shared: _Shared) -> None:
        self._shared = shared
        self._client = b"%d" % next(shared.clients)
        self._numbers = itertools.count()
        self._closed = False
        # Its thread starts with the first watch that is called.
        self._callbacks = ThreadPoolExecutor(1, "rankscope-hash-store")
        self._calling: int | None = None

    def clone(self) -> HashStore:
        with self._shared.lock:
            self._check_open()
        other = HashStore.__new__(HashStore)
        other.timeout = self.timeout
        other._open_on(self._shared)
        return other

    def _watch(
        self, names: Sequence[bytes], callback: Callable[[Sequence[bytes]], None]
    ) -> Callable[[], None]:
        wait = _Wait(
            lambda values: self._callbacks.submit(self._notify, callback, values)
        )
        with self._shared.lock:
            self._check_open()
            ticket, reply = self._request(wait, b"get", names)
            if reply is not None:
                self._callbacks.submit(self._notify, callback, reply)
        return lambda: self._drop(ticket)

    def close(self) -> None:
        """End every wait of this store; its clones keep the keys."""
        with self._shared.lock:
            self._closed = True
            for ticket in [one for one in self._shared.waits if one[0] == self._client]:
                self._shared.drop(ticket)
        inside = self._calling == threading.get_ident()
        self._callbacks.shutdown(wait=not inside, cancel_futures=True)

    def _check_open(self) -> None:
        if self._closed:
            raise DistStoreError("the hash store was closed")

    def _call(self, op: bytes, *args: bytes) -> Sequence[bytes]:
        with self._shared.lock:
            self._check_open()
            reply = self._shared.table.handle((self._client, b""), op, list(args))
        assert reply is not None
        return reply[1]

    def _await(
        self, op: bytes, names: Sequence[bytes], limit: float
    ) -> tuple[bool, Sequence[bytes]]:
        deadline = time.monotonic() + limit
        wait = _Wait()
        with self._shared.lock:
            self._check_open()
            ticket, reply = self._request(wait, op, names)
        if reply is not None:
            return True, reply
        try:
            wait.done.wait(remaining(deadline))
        finally:
            self._drop(ticket)
        if wait.status != b"ok":
            self._check_open()
        return wait.status == b"ok", wait.payload

    def _request(
        self, wait: _Wait, op: bytes, names: Sequence[bytes]
    ) -> tuple[Ticket, Sequence[bytes] | None]:
        """Do `op`, which may wait; return the ticket, and the answer if it is there."""
        ticket = self._client, b"%d" % next(self._numbers)
        self._shared.waits[ticket] = wait
        reply = self._shared.table.handle(ticket, op, list(names))
        if reply is None:
            return ticket, None
        del self._shared.waits[ticket]
        return ticket, reply[1]

    def _drop(self, ticket: Ticket) -> None:
        with self._shared.lock:
            self._shared.drop(ticket)

    def _notify(
        self, callback: Callable[[Sequence[bytes]], None], values: Sequence[bytes]
    ) -> None:
        self._calling = threading.get_ident()
        try:
            callback(values)
        except Exception:  # noqa: BLE001 - whatever a callback raises
            _log.exception("a callback of a store's watch failed")
        finally:
            self._calling = None

    def __repr__(self) -> str:
        return f"<HashStore {'closed' if self._closed else f'{self.num_keys()} keys'}>"
