"""Stores: the key-value rendezvous that ranks meet through.

The interface follows ``torch.distributed.Store``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

__all__ = ["Store"]


class Store:
    """Base class of the stores.  Keys are ``str``, values ``bytes``.

    Every wait has a timeout (seconds); its `DistStoreTimeoutError` names the
    keys that are still missing.
    """

    timeout: float = 300.0

    def set(self, key: str, value: bytes | str) -> None:
        """Set `key`, replacing what was there."""
        raise NotImplementedError

    def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        """Return the value of `key`, waiting for it to be set."""
        raise NotImplementedError

    def add(self, key: str, amount: int) -> int:
        """Add to the integer at `key` (absent: 0), atomically; return the sum."""
        raise NotImplementedError

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set `key` to `desired` if it is `expected`, atomically; return what it holds.

        An absent key counts as ``b""``.
        """
        raise NotImplementedError

    def wait(self, keys: Sequence[str], timeout: float | timedelta | None = None) -> None:
        """Block until all of `keys` are set."""
        raise NotImplementedError

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are set, without waiting."""
        raise NotImplementedError

    def delete_key(self, key: str) -> bool:
        """Remove `key`; say whether it was there."""
        raise NotImplementedError

    def num_keys(self) -> int:
        """How many keys are set."""
        raise NotImplementedError

    def watch(self, key: str, callback: Callable[[bytes], None]) -> Callable[[], None]:
        """Call ``callback(value)`` once, on a thread of the store's, when `key` is set.

        Returns a function that cancels. At most 0.1 s pass between set and call.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free sockets, threads and files; the store is unusable afterwards."""
