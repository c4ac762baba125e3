"""RankStore: this rank's connection to the store of all ranks, or the store itself."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from rankscope.backends import TCPStore

from ..wire import requests

__all__ = ["RankStore"]

#: Seconds that connecting to the ranks' store may take.
TIMEOUT = 10.0


class RankStore:
    """The store in which the groups meet; replaced when its host is lost."""

    def __init__(self, on_change: Callable[[TCPStore], None]) -> None:
        #: The present one; ``None`` before the first request.
        self.store: TCPStore | None = None
        self._on_change = on_change
        self._key = b""

    @property
    def is_host(self) -> bool:
        return self.store is not None and self.store.is_master

    @requests.HostStore.handler
    def host(self, wanted: requests.HostStore) -> requests.StoreAddress:
        self._key = secrets.token_bytes(32)
        self._replace(
            TCPStore(wanted.host, 0, is_master=True, timeout=TIMEOUT, key=self._key)
        )
        return self._address()

    @requests.GetStoreAddress.handler
    def _get_address(self, wanted: requests.GetStoreAddress) -> requests.StoreAddress:
        return self._address()

    @requests.IsStoreLost.handler
    def _is_lost(self, wanted: requests.IsStoreLost) -> bool:
        return self.store is None or self.store.lost

    def _address(self) -> requests.StoreAddress:
        assert self.store is not None
        return {
            "host": self.store.host,
            "port": self.store.port,
            "key": self._key.hex(),
        }

    @requests.JoinStore.handler
    def join(self, wanted: requests.JoinStore) -> None:
        key = bytes.fromhex(wanted.key)
        self._replace(TCPStore(wanted.host, wanted.port, timeout=TIMEOUT, key=key))

    def _replace(self, store: TCPStore) -> None:
        if self.store is not None:
            self.store.close()
        self.store = store
        self._on_change(store)
