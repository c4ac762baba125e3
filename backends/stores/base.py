"""Stores: key-value stores through which ranks exchange addresses and state."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from ..errors import DistNetworkTimeoutError, DistStoreTimeoutError, QueueEmptyError
from ..quantities import as_int, as_seconds
from ..rank_sets import name_ranks

__all__ = [
    "DEFAULT_TIMEOUT",
    "LAUNCHER",
    "OTHER_KEY",
    "OTHER_KEY_HINT",
    "RANK_0",
    "UNKNOWN_END",
    "Store",
    "join",
    "remaining",
    "to_bytes",
]

_log = logging.getLogger(__name__)

#: Seconds that a thread of a store gets to end.
END_WAIT = 5.0

#: Seconds that a wait of a store lasts by default.
DEFAULT_TIMEOUT = 300.0

#: What serves a store; a launcher outlives each rank.
RANK_0, LAUNCHER = "rank 0", "the launcher"

#: The key that a server sets once it has refused a process, and why it did.
OTHER_KEY = "refused/other key"
OTHER_KEY_HINT = (
    "refused a process whose key is another one: set the same RANKSCOPE_KEY on every "
    "rank"
)

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
    Named after ``torch.distributed.Store``, whose methods it has. They are requests to
    a table of keys, which a subclass takes there, and watches.

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

    # -- what a subclass defines, beside `clone` -----------------------------

    def _call(self, op: bytes, *args: bytes) -> Sequence[bytes]:
        """Return the answer to a request that does not wait for a key."""
        raise NotImplementedError

    def _await(
        self, op: bytes, names: Sequence[bytes], limit: float
    ) -> tuple[bool, Sequence[bytes]]:
        """Send a request that waits; return whether it was met, and its answer.

        Not met after `limit` seconds, the answer is what it still misses.
        """
        raise NotImplementedError

    def _watch(
        self, names: Sequence[bytes], callback: Callable[[Sequence[bytes]], None]
    ) -> Callable[[], None]:
        """Do `watch`, of several keys: once, with their values, when all are set."""
        raise NotImplementedError

    def _name(self, key: str) -> bytes:
        """Return what requests call `key`."""
        if not isinstance(key, str):
            raise TypeError(f"a key of a store is a str, not {type(key).__name__}")
        return key.encode()

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        # A str is a sequence of str, too, and its letters are not what is meant.
        if isinstance(keys, str):
            raise TypeError(f"keys is {keys!r}, a str; expected a list of keys")
        return list(map(self._name, keys))

    # -- the methods -----------------------------------------------------------

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
        self._call(b"set", self._name(key), to_bytes(value))

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
        return self.multi_get([key], timeout)[0]

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
        self._call(b"append", self._name(key), to_bytes(value))

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
        limit, names = self._limit(timeout), self._names(keys)
        if not names:
            return []
        met, values = self._await(b"get", names, limit)
        if not met:
            raise _missing_keys_error([key.decode() for key in values], limit)
        return list(values)

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
        if len(keys) != len(values):
            raise ValueError(
                f"multi_set: {len(keys)} keys and {len(values)} values; expected as "
                "many"
            )
        pairs = zip(self._names(keys), map(to_bytes, values), strict=True)
        self._call(b"sets", *itertools.chain.from_iterable(pairs))

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
        number = b"%d" % as_int(amount, "add: amount")
        return int(self._call(b"add", self._name(key), number)[0])

    def compare_set(
        self, key: str, expected: bytes | str, desired: bytes | str
    ) -> bytes:
        """Set `key` to `desired` if it is `expected`, atomically; return what it holds.

        Returns
        -------
        bytes
            `desired` if it was set; else the value of `key`, or `expected` if it is
            absent.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.compare_set("leader", "", "rank 0")  # absent: it is set
        b'rank 0'
        >>> store.compare_set("leader", "", "rank 1")
        b'rank 0'
        """
        values = to_bytes(expected), to_bytes(desired)
        return self._call(b"swap", self._name(key), *values)[0]

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
        self.multi_get(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of `keys` are set, without waiting.

        Examples
        --------
        >>> dist.HashStore().check(["address"])
        False
        """
        return self._call(b"check", *self._names(keys))[0] == b"1"

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
        return self._call(b"delete", self._name(key))[0] == b"1"

    def clear(self) -> None:
        """Remove all keys; of a `PrefixStore`, those with its prefix.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.multi_set(["tp/0", "tp/1", "dp/0"], ["", "", ""])
        >>> dist.PrefixStore("tp", store).clear()
        >>> store.list_keys()
        ['dp/0']
        """
        self._call(b"clear", self._name(""))

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
        return int(self._call(b"count")[0])

    def list_keys(self) -> list[str]:
        """Return the keys that are set, in no order.

        Examples
        --------
        >>> store = dist.HashStore()
        >>> store.multi_set(["ready/0", "ready/1"], ["", ""])
        >>> sorted(store.list_keys())
        ['ready/0', 'ready/1']
        """
        start = self._name("")
        return [
            name[len(start) :].decode()
            for name in self._call(b"keys")
            if name.startswith(start)
        ]

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
        self._call(b"push", self._name(key), to_bytes(value))

    def queue_pop(
        self, key: str, block: bool = True, timeout: float | timedelta | None = None
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
        name = self._name(key)
        if not block:
            values = self._call(b"pop now", name)
            if not values:
                raise QueueEmptyError(
                    f"queue_pop: the queue {name.decode()!r} is empty"
                )
            return values[0]
        limit = self._limit(timeout)
        met, values = self._await(b"pop", [name], limit)
        if not met:
            raise DistStoreTimeoutError(
                f"queue_pop: after {limit:g} s the queue {name.decode()!r} is still "
                "empty"
            )
        return values[0]

    def queue_len(self, key: str) -> int:
        """Return how many values are in the queue `key`."""
        return int(self._call(b"queued", self._name(key))[0])

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
        return self._watch([self._name(key)], lambda values: callback(values[0]))

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

    def no_answer(self) -> DistNetworkTimeoutError | None:
        """Return the error for calls that are not answered, where others serve it.

        Its culprits are those that serve it, if their process is known to be stopped.
        """
        return None

    def close(self) -> None:
        """Free sockets, threads and files; the store is unusable afterwards."""


def to_bytes(value: bytes | str) -> bytes:
    """Return `value` as the bytes that a store holds; `str` is encoded as UTF-8."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a store keeps bytes or str, not {type(value).__name__}")


def _missing_keys_error(keys: Sequence[str], timeout: float) -> DistStoreTimeoutError:
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


def join(thread: threading.Thread, what: str) -> None:
    """Wait until `thread`, a daemon, has ended, `END_WAIT` seconds at most."""
    if thread is threading.current_thread():
        return
    thread.join(END_WAIT)
    if thread.is_alive():
        _log.warning("%s has not ended within %g s: it is left behind", what, END_WAIT)


def remaining(deadline: float) -> float:
    """Return the seconds until `deadline` (``time.monotonic``), never negative."""
    return max(0.0, deadline - time.monotonic())
