"""Stores: key-value stores through which ranks exchange addresses and state.

The interface follows ``torch.distributed.Store``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from ..errors import DistStoreError, DistStoreTimeoutError, QueueEmptyError
from ..quantities import as_int, as_seconds
from ..rank_sets import name_ranks

__all__ = [
    "DEFAULT_TIMEOUT",
    "LAUNCHER",
    "MAX_DIGITS",
    "MAX_VALUE",
    "RANK_0",
    "UNKNOWN_END",
    "Store",
    "empty_queue_error",
    "join",
    "missing_keys_error",
    "remaining",
    "sum_of",
    "to_bytes",
    "to_pairs",
]

_log = logging.getLogger(__name__)

#: Seconds that a thread of a store gets to end.
END_WAIT = 5.0

#: Seconds that a wait of a store lasts by default.
DEFAULT_TIMEOUT = 300.0

#: What serves a store; a launcher outlives each rank.
RANK_0, LAUNCHER = "rank 0", "the launcher"

#: Most digits of a store's integer: to parse a million digits takes minutes.
MAX_DIGITS = 1000
#: Most bytes of a value that grows by `Store.append`.
MAX_VALUE = 128 << 20

#: What a last will says of the end of its process: see `Store.last_will`.
UNKNOWN_END = (
    "it was killed, crashed or left without destroy_process_group(), or its network "
    "failed"
)


class Store:
    """Base class of the stores: keys that are ``str``, with values that are ``bytes``.

    Every wait has a timeout, seconds or a `timedelta`; with 0 it does not wait. Its
    `DistStoreTimeoutError` names the keys that are still missing, and their ranks. All
    methods may be called from several threads at once, and a waiting thread blocks no
    other thread. After `close` every method, and every wait in progress, raises
    `DistStoreError`; a `TCPStore` raises `DistNetworkError` once it has lost the
    process that serves it. The arguments of the methods:

    - `key`, `keys`: names of values, of queues, or of a barrier.
    - `value`, `values`, `expected`, `desired`: bytes or text, which becomes UTF-8;
      anything else is a `TypeError`.
    - `amount`: an integer to add; 0 reads the number.
    - `timeout`: how long to wait at most, by default `timeout` of the store.
    - `block`: whether to wait for a value if the queue is empty.
    - `world_size`: the number of callers.
    - `callback`: one that raises is logged, and others are called all the same.

    Notes
    -----
    Named after ``torch.distributed.Store``, whose methods it has. A subclass defines
    all of them but `barrier`, `has_extended_api` and those of deaths; `set_timeout` and
    `timeout` are here.

    Examples
    --------
    >>> store = dist.HashStore(timeout=5)
    >>> isinstance(store, dist.Store)
    True
    >>> store.set("address", "10.0.0.1:29500")
    >>> store.get("address")
    b'10.0.0.1:29500'
    >>> store.add("ranks here", 1), store.add("ranks here", 1)
    (1, 2)
    >>> store.check(["address", "other"])
    False
    """

    _timeout = DEFAULT_TIMEOUT

    #: What serves the keys, in messages: `RANK_0` or `LAUNCHER`.
    server = RANK_0

    @property
    def timeout(self) -> timedelta:
        """How long a wait lasts that is given no timeout of its own."""
        return timedelta(seconds=self._timeout)

    @timeout.setter
    def timeout(self, timeout: float | timedelta) -> None:
        self._timeout = as_seconds(timeout, "the timeout of a store")

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Set `timeout`, for this store object alone.

        Parameters
        ----------
        timeout : float or timedelta
            How long a wait lasts that is given no timeout of its own.

        Raises
        ------
        TypeError, ValueError
            It is no duration, or negative.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.set_timeout(5)
        >>> store.timeout
        datetime.timedelta(seconds=5)
        """
        self._timeout = as_seconds(timeout, "set_timeout: timeout")

    def _limit(self, timeout: float | timedelta | None) -> float:
        if timeout is None:
            return self._timeout
        return as_seconds(timeout, "the timeout of a store's wait")

    def set(self, key: str, value: bytes | str) -> None:
        """Set `key`, replacing what was there.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.set("address", "10.0.0.1:29500")
        """
        raise NotImplementedError

    def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        """Return the value of `key`, waiting for it to be set.

        Raises
        ------
        DistStoreTimeoutError
            A key is still missing after `timeout`; the message names it, and its rank.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.set("lr", "0.1")
        >>> store.get("lr")
        b'0.1'
        """
        raise NotImplementedError

    def append(self, key: str, value: bytes | str) -> None:
        """Append `value` to the value of `key` (absent: empty), atomically.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.append("log", "a"), store.append("log", "b")
        (None, None)
        >>> store.get("log")
        b'ab'
        """
        raise NotImplementedError

    def multi_get(
        self, keys: Sequence[str], timeout: float | timedelta | None = None
    ) -> list[bytes]:
        """Return the values of `keys`, in order, waiting for all of them to be set.

        Raises
        ------
        DistStoreTimeoutError
            As from `get`.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.multi_set(["a", "b"], ["1", "2"])
        >>> store.multi_get(["b", "a"])
        [b'2', b'1']
        """
        raise NotImplementedError

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Set each of `keys` to the value beside it, all at once.

        Raises
        ------
        ValueError
            There are not as many values as keys.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.multi_set(["lr", "steps"], ["0.1", "100"])
        >>> store.get("steps")
        b'100'
        """
        raise NotImplementedError

    def add(self, key: str, amount: int) -> int:
        """Add to the integer at `key` (absent: 0), atomically; return the sum.

        Of callers that add 1 each gets another number: a counter hands out places in a
        row.

        Returns
        -------
        int
            The number after the addition.

        Raises
        ------
        TypeError
            `amount` is no integer.
        DistStoreError
            The value of `key` is no integer, or the store is closed.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.add("arrived", 1), store.add("arrived", 1), store.add("arrived", 0)
        (1, 2, 2)
        """
        raise NotImplementedError

    def compare_set(
        self, key: str, expected: bytes | str, desired: bytes | str
    ) -> bytes:
        """Set `key` to `desired` if it is `expected`, atomically; return what it holds.

        Returns
        -------
        bytes
            `desired` if it was set; else the value of `key`, ``b""`` if it is absent.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.compare_set("leader", "", "rank 0")  # absent: it is set
        b'rank 0'
        >>> store.compare_set("leader", "", "rank 1")
        b'rank 0'
        """
        raise NotImplementedError

    def wait(
        self, keys: Sequence[str], timeout: float | timedelta | None = None
    ) -> None:
        """Block until all of `keys` are set.

        Raises
        ------
        DistStoreTimeoutError
            As from `get`.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.set("ready/0", "")
        >>> store.wait(["ready/0"], timeout=5)
        """
        raise NotImplementedError

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of `keys` are set, without waiting.

        Examples
        --------
        >>> dist.HashStore().check(["address"])
        False
        """
        raise NotImplementedError

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return whether it was set.

        Returns
        -------
        bool
            Whether it was set.

        Examples
        --------
        >>> dist.HashStore().delete_key("address")
        False
        """
        raise NotImplementedError

    def num_keys(self) -> int:
        """Return how many keys are set; queues are no keys.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.set("address", "10.0.0.1:29500")
        >>> store.queue_push("jobs", "first")
        >>> store.num_keys()
        1
        """
        raise NotImplementedError

    def list_keys(self) -> list[str]:
        """Return the keys that are set, in no order.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.multi_set(["ready/0", "ready/1"], ["", ""])
        >>> sorted(store.list_keys())
        ['ready/0', 'ready/1']
        """
        raise NotImplementedError

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Put `value` at the end of the queue `key`, which needs no making.

        A queue and a key of the same name have nothing to do with each other.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.queue_push("jobs", "first")
        >>> store.queue_push("jobs", "second")
        >>> store.queue_len("jobs"), store.queue_pop("jobs")
        (2, b'first')
        """
        raise NotImplementedError

    def queue_pop(
        self,
        key: str,
        block: bool = True,
        timeout: float | timedelta | None = None,
    ) -> bytes:
        """Take the first value out of the queue `key`; each value goes to one caller.

        Returns
        -------
        bytes
            The value.

        Raises
        ------
        QueueEmptyError
            With ``block=False``, at once: the queue is empty.
        DistStoreTimeoutError
            The queue was empty until the timeout passed.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.queue_push("jobs", "first")
        >>> store.queue_pop("jobs"), store.queue_len("jobs")
        (b'first', 0)
        """
        raise NotImplementedError

    def queue_len(self, key: str) -> int:
        """Return how many values are in the queue `key`."""
        raise NotImplementedError

    def clone(self) -> Store:
        """Return another store of the same keys, which is closed by itself.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> other = store.clone()  # for another thread
        >>> other.set("key", "value")
        >>> other.close()
        >>> store.get("key")
        b'value'
        """
        raise NotImplementedError

    def has_extended_api(self) -> bool:
        """Return whether there are `append`, `multi_get` and `multi_set`: always."""
        return True

    def barrier(
        self, key: str, world_size: int, timeout: float | timedelta | None = None
    ) -> None:
        """Block until `world_size` callers have come to the barrier `key`.

        It may be used again, by as many callers. Its keys begin with `key`.

        Raises
        ------
        TypeError, ValueError
            `world_size` is no integer from 1, or `timeout` no duration.

        Examples
        --------
        >>> import threading
        >>> store = dist.HashStore()
        >>> other = threading.Thread(target=store.barrier, args=("ready", 2))
        >>> other.start()
        >>> store.barrier("ready", 2, timeout=5)  # both have come
        >>> other.join()
        """
        size = as_int(world_size, "barrier: world_size")
        if size < 1:
            raise ValueError(f"barrier: world_size={size}; expected at least 1")
        place = self.add(f"{key}/entered", 1) - 1
        everybody = f"{key}/round {place // size}"
        if place % size == size - 1:
            self.set(everybody, b"")
        self.wait([everybody], timeout)

    def watch(self, key: str, callback: Callable[[bytes], None]) -> Callable[[], None]:
        """Call ``callback(value)`` once, on a thread of the store, when `key` is set.

        At most 0.1 s pass between set and call. Callbacks run one after another, so a
        callback should be short; it may use the store.

        Returns
        -------
        callable
            Cancels the watch.

        Examples
        --------
        >>> import threading
        >>> store, stopped = dist.HashStore(), threading.Event()
        >>> cancel = store.watch("stop", lambda value: stopped.set())
        >>> store.set("stop", "now")
        >>> stopped.wait(5)
        True
        """
        raise NotImplementedError

    # Deaths: only a TCPStore made with ``reports_deaths=True`` reports them.

    def last_will(self, key: str, value: bytes | str) -> bool:
        """Register `value` as what the store sets at `key` if this process dies.

        A `key` that is already set then is kept; in one that ends in ``/+`` the store
        replaces the plus by the next number of the counter before the slash: ``left/+``
        becomes ``left/3`` where `add` would make `left` 3. An empty `value` drops the
        will for `key`.

        A death is any end of the process without a preceding call of `withdraw`. The
        term is MQTT's. Where the store finds out how the process ended, it replaces
        `UNKNOWN_END` in `value`, by ``killed by SIGKILL`` for one.

        Returns
        -------
        bool
            Whether the store does so: a `TCPStore` made with ``reports_deaths=True``
            does.

        Examples
        --------
        >>> store = dist.TCPStore(
        ...     "127.0.0.1", 0, is_master=True, key=b"secret", reports_deaths=True
        ... )
        >>> store.last_will("died/0", "rank 0 died")  # set if this process is killed
        True
        >>> store.withdraw()  # the end is an orderly one
        >>> store.close()
        """
        return False

    def withdraw(self) -> None:
        """Drop the last wills of this process, before an orderly end."""

    def watch_loss(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call ``callback(message)`` when the process that serves the store has died.

        Returns
        -------
        callable
            Cancels the call.
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


def to_pairs(
    keys: Sequence[str], values: Sequence[bytes | str]
) -> list[tuple[str, bytes]]:
    """Return what `Store.multi_set` sets; `ValueError` unless there are as many."""
    if len(keys) != len(values):
        raise ValueError(
            f"multi_set: {len(keys)} keys and {len(values)} values; expected as many"
        )
    return [(key, to_bytes(value)) for key, value in zip(keys, values, strict=True)]


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


def empty_queue_error(key: str, timeout: float | None) -> DistStoreError:
    """Return the error of a `queue_pop`, after `timeout` seconds or without waiting."""
    if timeout is None:
        return QueueEmptyError(f"queue_pop: the queue {key!r} is empty")
    return DistStoreTimeoutError(
        f"queue_pop: after {timeout:g} s the queue {key!r} is still empty"
    )


def join(thread: threading.Thread, what: str) -> None:
    """Wait until `thread` has ended, `END_WAIT` seconds at most; say if it has not.

    Parameters
    ----------
    thread
        A daemon thread, which does not keep the process.
    what
        What it was to do, for the log.
    """
    if thread is threading.current_thread():
        return
    thread.join(END_WAIT)
    if thread.is_alive():
        _log.warning("%s has not ended within %g s: it is left behind", what, END_WAIT)


def remaining(deadline: float) -> float:
    """Return the seconds until `deadline` (``time.monotonic``), never negative."""
    return max(0.0, deadline - time.monotonic())
