"""PrefixStore: the keys of another store with one prefix, as a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from ..errors import DistStoreError, DistStoreTimeoutError
from .base import Store, empty_queue_error, missing_keys_error, remaining

__all__ = ["PrefixStore"]

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

    def set(self, key: str, value: bytes | str) -> None:
        self._open().set(self._full(key), value)

    def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        return self.multi_get([key], timeout)[0]

    def append(self, key: str, value: bytes | str) -> None:
        self._open().append(self._full(key), value)

    def multi_get(
        self, keys: Sequence[str], timeout: float | timedelta | None = None
    ) -> list[bytes]:
        limit = self._limit(timeout)
        deadline = time.monotonic() + limit
        self.wait(keys, limit)
        names = [self._full(key) for key in keys]
        return self._open().multi_get(names, remaining(deadline) + 1.0)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._open().multi_set([self._full(key) for key in keys], values)

    def add(self, key: str, amount: int) -> int:
        return self._open().add(self._full(key), amount)

    def compare_set(
        self, key: str, expected: bytes | str, desired: bytes | str
    ) -> bytes:
        return self._open().compare_set(self._full(key), expected, desired)

    def wait(
        self, keys: Sequence[str], timeout: float | timedelta | None = None
    ) -> None:
        # By watches, because `close` of this object could not end a `wait` of the
        # underlying store.
        limit = self._limit(timeout)
        deadline = time.monotonic() + limit
        names = [self._full(key) for key in keys]
        if self._open().check(names):
            return
        missing = set(names)

        def discard(key: str, value: bytes) -> None:
            with self._changed:
                missing.discard(key)
                self._changed.notify_all()

        cancels = [self._open().watch(key, partial(discard, key)) for key in set(names)]
        try:
            while True:
                pause = min(_RECHECK, remaining(deadline))
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or not missing, pause)
                for key in list(missing):
                    if self._open().check([key]):
                        discard(key, b"")
                if not missing:
                    return
                if time.monotonic() >= deadline:
                    left = [key for key in names if key in missing]
                    raise missing_keys_error(left, limit)
        finally:
            for cancel in cancels:
                cancel()

    def check(self, keys: Sequence[str]) -> bool:
        return self._open().check([self._full(key) for key in keys])

    def delete_key(self, key: str) -> bool:
        return self._open().delete_key(self._full(key))

    def num_keys(self) -> int:
        """Return how many keys the underlying store holds, with any prefix."""
        return self._open().num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys that are set with this prefix, without it."""
        start = self._full("")
        return [
            key[len(start) :]
            for key in self._open().list_keys()
            if key.startswith(start)
        ]

    def queue_push(self, key: str, value: bytes | str) -> None:
        self._open().queue_push(self._full(key), value)

    def queue_pop(
        self,
        key: str,
        block: bool = True,
        timeout: float | timedelta | None = None,
    ) -> bytes:
        if not block:
            return self._open().queue_pop(self._full(key), block=False)
        limit = self._limit(timeout)
        deadline = time.monotonic() + limit
        # In parts: `close` of this object ends the wait within a second.
        while True:
            pause = min(_RECHECK, remaining(deadline))
            try:
                return self._open().queue_pop(self._full(key), timeout=pause)
            except DistStoreTimeoutError as error:
                if time.monotonic() >= deadline:
                    raise empty_queue_error(self._full(key), limit) from error

    def queue_len(self, key: str) -> int:
        return self._open().queue_len(self._full(key))

    def clone(self) -> PrefixStore:
        made = PrefixStore(self.prefix, self._open().clone())
        made.timeout = self.timeout
        made._owns_store = True
        return made

    def watch(self, key: str, callback: Callable[[bytes], None]) -> Callable[[], None]:

        def fire(value: bytes) -> None:
            with self._changed:
                self._cancels.discard(cancel)
                if self._closed:
                    return
            callback(value)

        inner: list[Callable[[], None]] = []

        def cancel() -> None:
            with self._changed:
                self._cancels.discard(cancel)
            for stop in inner:
                stop()

        store = self._open()
        with self._changed:
            self._cancels.add(cancel)
        inner.append(store.watch(self._full(key), fire))
        return cancel

    def last_will(self, key: str, value: bytes | str) -> bool:
        return self._open().last_will(self._full(key), value)

    def withdraw(self) -> None:
        self._open().withdraw()

    def watch_loss(self, callback: Callable[[str], None]) -> Callable[[], None]:
        return self._open().watch_loss(callback)

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

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _open(self) -> Store:
        if self._closed:
            raise DistStoreError(f"the store with prefix {self.prefix!r} was closed")
        return self.underlying_store

    def __repr__(self) -> str:
        return f"PrefixStore({self.prefix!r}, {self.underlying_store!r})"
