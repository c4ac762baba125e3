"""Stores: key-value stores through which ranks exchange addresses and state.

The interface follows ``torch.distributed.Store``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from ..errors import DistStoreError, DistStoreTimeoutError
from ..rank_sets import name_ranks

__all__ = [
    "MAX_DIGITS",
    "UNKNOWN_END",
    "Store",
    "missing_keys_error",
    "remaining",
    "sum_of",
    "to_bytes",
    "to_seconds",
]

#: Most digits of a store's integer: to parse a million digits takes minutes.
MAX_DIGITS = 1000

#: What a last will says of the end of its process: see `Store.last_will`.
UNKNOWN_END = (
    "it was killed, crashed or left without destroy_process_group(), or its network "
    "failed"
)


class Store:
    """Base class of the stores.  Keys are ``str``, values ``bytes``.

    Every wait has a timeout (seconds); its `DistStoreTimeoutError` names the
    keys that are still missing. All methods may be called from several threads
    at once, and a waiting thread blocks no other thread. After `close` every
    method, and every wait in progress, raises `DistStoreError`.
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

    def compare_set(
        self, key: str, expected: bytes | str, desired: bytes | str
    ) -> bytes:
        """Set `key` to `desired` if it is `expected`, atomically; return what it holds.

        An absent key counts as ``b""``.
        """
        raise NotImplementedError

    def wait(
        self, keys: Sequence[str], timeout: float | timedelta | None = None
    ) -> None:
        """Block until all of `keys` are set."""
        raise NotImplementedError

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of `keys` are set, without waiting."""
        raise NotImplementedError

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return whether it was set."""
        raise NotImplementedError

    def num_keys(self) -> int:
        """Return how many keys are set."""
        raise NotImplementedError

    def watch(self, key: str, callback: Callable[[bytes], None]) -> Callable[[], None]:
        """Call ``callback(value)`` once, on a thread of the store, when `key` is set.

        Returns a function that cancels the watch. At most 0.1 s pass between set
        and call. Callbacks run one after another, so a callback should be short;
        it may use the store.
        """
        raise NotImplementedError

    # Deaths: only a TCPStore made with ``reports_deaths=True`` reports them.

    def last_will(self, key: str, value: bytes | str) -> None:
        """Register `value` as what the store sets at `key` if this process dies.

        A `key` that is already set then is kept. A death is any end of the process
        without a preceding call of `withdraw`. The term is MQTT's. Where the store
        finds out how the process ended, it replaces `UNKNOWN_END` in `value`, by
        ``killed by SIGKILL`` for one.
        """

    def withdraw(self) -> None:
        """Drop the last wills of this process, before an orderly end."""

    def watch_loss(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call ``callback(message)`` when the process that serves the store has died.

        Returns a function that cancels the call.
        """
        return lambda: None

    def close(self) -> None:
        """Free sockets, threads and files; the store is unusable afterwards."""


def to_bytes(value: bytes | str) -> bytes:
    """Return `value` as the bytes that a store holds; `str` is encoded as UTF-8."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a store keeps bytes or str, not {type(value).__name__}")


def to_seconds(timeout: float | timedelta | None, default: float) -> float:
    """Return `timeout` in seconds; ``None`` means `default`."""
    if timeout is None:
        return default
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    return float(timeout)


def sum_of(key: str, value: bytes | None, amount: int) -> bytes:
    """Return the value of `key` after adding `amount` to `value` (``None``: absent)."""
    try:
        if value is not None and len(value) > MAX_DIGITS:
            raise ValueError(f"{len(value)} bytes")
        return b"%d" % (int(value or b"0") + amount)
    except ValueError as error:
        raise DistStoreError(
            f"add: key {key!r} holds {(value or b'')[:32]!r}, which is no integer"
        ) from error


def missing_keys_error(keys: Sequence[str], timeout: float) -> DistStoreTimeoutError:
    """Return the error of a wait for `keys` that lasted `timeout` seconds.

    A key that ends in a rank (``.../3``) is set by that rank, so the message also
    names the ranks of such keys; these ranks are the error's culprits.
    """
    shown = ", ".join(map(repr, keys[:8]))
    if len(keys) > 8:
        shown += f" and {len(keys) - 8} more"
    tails = [key.rpartition("/")[2] for key in keys if "/" in key]
    ranks = sorted({int(tail) for tail in tails if tail.isascii() and tail.isdigit()})
    message = f"after {timeout:g} s the store still misses {shown}"
    if ranks:
        message += f": {name_ranks(ranks)} did not come"
    return DistStoreTimeoutError(message, culprits=ranks)


def remaining(deadline: float) -> float:
    """Return the seconds until `deadline` (``time.monotonic``), never negative."""
    return max(0.0, deadline - time.monotonic())
