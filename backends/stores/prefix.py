"""PrefixStore: the keys of another store with one prefix, as a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ..errors import DistNetworkTimeoutError, DistStoreError
from .base import Store, remaining

__all__ = ["PrefixStore", "without_prefixes"]

# Seconds after which a wait checks the underlying store again, because a watch does
# not report a lost connection.
_RECHECK = 1.0


class PrefixStore(Store):
    """A store with ``prefix/`` put before every key (``c10d::PrefixStore``).

    `close` ends the waits and watches made through this object (a `queue_pop` within a
    second) and leaves the underlying store open for its other users. `num_keys` counts
    the keys of the underlying store, as c10d does; `list_keys` lists those with the
    prefix, without it.

    Parameters
    ----------
    prefix : str
        What is put before the keys, without the slash.
    store : Store
        The store that has the keys. The timeout is its timeout at first, and is then
        set by itself.

    Examples
    --------
    >>> store = dist.HashStore()
    >>> mine = dist.PrefixStore("mine", store)
    >>> mine.set("key", "value")
    >>> store.get("mine/key"), mine.list_keys()
    (b'value', ['key'])
    """

    #: The store that has the keys.
    underlying_store: Store

    def __init__(self, prefix: str, store: Store) -> None:
        self.prefix = prefix
        self.underlying_store = store
        self.timeout = store.timeout
        self.server = store.server
        self._owns_store = False
        self._changed = threading.Condition()
        self._cancels: set[Callable[[], None]] = set()
        self._closed = False

    def _name(self, key: str) -> bytes:
        return self.underlying_store._name(f"{self.prefix}/") + super()._name(key)

    def _call(self, op: bytes, *args: bytes) -> Sequence[bytes]:
        return self._open()._call(op, *args)

    def _await(
        self, op: bytes, names: Sequence[bytes], limit: float
    ) -> tuple[bool, Sequence[bytes]]:
        # `close` of this object could not end a wait of the underlying store: here,
        # watches wake this thread, and a pop is tried again.
        deadline = time.monotonic() + limit
        values: list[Sequence[bytes]] = []
        cancels: list[Callable[[], None]] = []

        def note(found: Sequence[bytes]) -> None:
            with self._changed:
                values.append(found)
                self._changed.notify_all()

        try:
            while True:
                pause = min(_RECHECK, remaining(deadline))
                in_parts = pause if op == b"pop" else 0.0
                met, found = self._open()._await(op, names, in_parts)
                if met or time.monotonic() >= deadline:
                    return met, found
                if op == b"pop":
                    continue
                if not cancels:
                    # One for all: a watch for each would be as many requests, of each
                    # of as many ranks.
                    cancels.append(self._open()._watch(names, note))
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or values, pause)
                if values:
                    return True, values[0]
        finally:
            for cancel in cancels:
                cancel()

    def clone(self) -> PrefixStore:
        made = PrefixStore(self.prefix, self._open().clone())
        made.timeout = self.timeout
        made._owns_store = True
        return made

    def _watch(
        self, names: Sequence[bytes], callback: Callable[[Sequence[bytes]], None]
    ) -> Callable[[], None]:

        def fire(values: Sequence[bytes]) -> None:
            with self._changed:
                self._cancels.discard(cancel)
                if self._closed:
                    return
            callback(values)

        inner: list[Callable[[], None]] = []

        def cancel() -> None:
            with self._changed:
                self._cancels.discard(cancel)
            for stop in inner:
                stop()

        store = self._open()
        with self._changed:
            self._cancels.add(cancel)
        inner.append(store._watch(names, fire))
        return cancel

    def last_will(self, key: str, value: bytes | str) -> bool:
        return self._open().last_will(f"{self.prefix}/{key}", value)

    def withdraw(self) -> None:
        self._open().withdraw()

    def watch_loss(self, callback: Callable[[str], None]) -> Callable[[], None]:
        return self._open().watch_loss(callback)

    def no_answer(self) -> DistNetworkTimeoutError | None:
        return self.underlying_store.no_answer()

    def close(self) -> None:
        """End the waits and watches made here; the underlying store stays open."""
        with self._changed:
            self._closed = True
            cancels = list(self._cancels)
            self._changed.notify_all()
        for cancel in cancels:
            cancel()
        if self._owns_store:
            self.underlying_store.close()

    def _open(self) -> Store:
        if self._closed:
            raise DistStoreError(f"the store with prefix {self.prefix!r} was closed")
        return self.underlying_store

    def __repr__(self) -> str:
        return f"PrefixStore({self.prefix!r}, {self.underlying_store!r})"


def without_prefixes(store: Store) -> Store:
    """Return the store that has the keys of `store`."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
