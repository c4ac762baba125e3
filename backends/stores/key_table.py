"""KeyTable: the keys of a store and the requests that wait for them, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from ..errors import DistStoreError
from ..quantities import as_int
from .base import (
    MAX_DIGITS,
    MAX_VALUE,
    UNKNOWN_END,
    Store,
    empty_queue_error,
    missing_keys_error,
    sum_of,
    to_bytes,
    to_pairs,
)

__all__ = ["NEXT_NUMBER", "KeyTable", "Reply", "RequestStore", "Ticket"]

#: The end of the key of a last will that takes its place in a row: see `last_will`.
NEXT_NUMBER = b"/+"

#: A request: the routing id of its client and the number that the client gave it.
Ticket = tuple[bytes, bytes]
#: Status and payload of an answer.
Reply = tuple[bytes, list[bytes]]


class KeyTable:
    """The keys, and the requests that wait for them: the store without its sockets.

    `handle` takes a request and returns ``(status, payload)``, or ``None``
    when the answer has to wait. Answers to earlier requests go to `answer`.
    """

    def __init__(
        self, answer: Callable[[Ticket, bytes, Sequence[bytes]], object]
    ) -> None:
        self._answer = answer
        self._values: dict[bytes, bytes] = {}
        # The keys that each waiting request still misses, and the reverse map.
        self._missing: dict[Ticket, set[bytes]] = {}
        self._wanted: dict[bytes, list[Ticket]] = {}
        self._keys_of: dict[Ticket, list[bytes]] = {}
        # Queues that are not empty, and the requests that wait for an empty one.
        self._queues: dict[bytes, deque[bytes]] = {}
        self._poppers: dict[bytes, deque[Ticket]] = {}
        self._popping: dict[Ticket, bytes] = {}
        #: Client → the keys and values to set when the client has died.
        self.wills: dict[bytes, dict[bytes, bytes]] = {}

    def handle(self, ticket: Ticket, op: bytes, args: list[bytes]) -> Reply | None:
        """Do `op`; raises `DistStoreError` or `ValueError` for a bad request."""
        if op == b"set":
            key, value = args
            self._put(key, value)
            return b"ok", []
        if op == b"get":
            return self._get(ticket, args)
        if op == b"append":
            key, value = args
            whole = self._values.get(key, b"") + value
            if len(whole) > MAX_VALUE:
                raise DistStoreError(
                    f"append: the value of {key!r} would have {len(whole)} bytes, more "
                    f"than a store takes ({MAX_VALUE})"
                )
            self._put(key, whole)
            return b"ok", []
        if op == b"sets":
            for key, value in list(zip(args[::2], args[1::2], strict=True)):
                self._put(key, value)
            return b"ok", []
        if op == b"keys":
            return b"ok", list(self._values)
        if op == b"push":
            key, value = args
            self._push(key, value)
            return b"ok", []
        if op == b"pop":
            (key,) = args
            return self._pop(ticket, key)
        if op == b"pop now":
            (key,) = args
            return b"ok", [self._take(key)] if key in self._queues else []
        if op == b"queued":
            (key,) = args
            return b"ok", [b"%d" % len(self._queues.get(key, ()))]
        if op == b"add":
            key, amount = args
            if len(amount) > MAX_DIGITS:
                raise ValueError(f"add: an amount of {len(amount)} digits")
            total = sum_of(key.decode(), self._values.get(key), int(amount))
            self._put(key, total)
            return b"ok", [total]
        if op == b"swap":
            key, expected, desired = args
            held = self._values.get(key, b"")
            if held == expected:
                self._put(key, desired)
                held = desired
            return b"ok", [held]
        if op == b"check":
            return b"ok", [b"1" if all(key in self._values for key in args) else b"0"]
        if op == b"delete":
            (key,) = args
            return b"ok", [b"0" if self._values.pop(key, None) is None else b"1"]
        if op == b"count":
            return b"ok", [b"%d" % len(self._values)]
        if op == b"will":
            left = dict(zip(args[::2], args[1::2], strict=True))
            self.wills.setdefault(ticket[0], {}).update(left)
            return b"ok", []
        if op == b"unwill":
            self.wills.pop(ticket[0], None)
            return b"ok", []
        if op == b"drop":
            (number,) = args
            self._drop((ticket[0], number))
            return None
        raise ValueError(f"unknown operation {op!r}")

    def execute(self, client: bytes, end: str | None = None) -> None:
        """Set the last wills of `client`, which has died; `end` says how, if known."""
        for key, value in self.wills.pop(client, {}).items():
            if not value:
                continue
            if key.endswith(NEXT_NUMBER):
                key = self._next_of(key.removesuffix(NEXT_NUMBER))
            if not self._values.get(key):
                if end is not None:
                    value = value.replace(UNKNOWN_END.encode(), end.encode())
                self._put(key, value)

    def _next_of(self, counter: bytes) -> bytes:
        """Return the key under the next number of `counter`."""
        total = sum_of(counter.decode(), self._values.get(counter), 1)
        self._put(counter, total)
        return b"%s/%s" % (counter, total)

    def _get(self, ticket: Ticket, keys: list[bytes]) -> Reply | None:
        missing = {key for key in keys if key not in self._values}
        if not missing:
            return b"ok", [self._values[key] for key in keys]
        if ticket in self._missing or ticket in self._popping:
            # Else no key would lead to the first request of that ticket any more.
            raise ValueError(f"request {ticket[1]!r} waits already")
        self._missing[ticket] = missing
        self._keys_of[ticket] = keys
        for key in missing:
            self._wanted.setdefault(key, []).append(ticket)
        return None

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for ticket in self._wanted.pop(key, ()):
            missing = self._missing[ticket]
            missing.discard(key)
            # A key that was set and deleted again counts as set.
            if not missing:
                del self._missing[ticket]
                keys = self._keys_of.pop(ticket)
                self._answer(ticket, b"ok", [self._values.get(k, b"") for k in keys])

    def _push(self, key: bytes, value: bytes) -> None:
        while key in self._poppers:
            ticket = self._poppers[key][0]
            self._forget_popper(ticket)
            # The client may have died while it waited: the next one gets the value.
            if self._answer(ticket, b"ok", [value]) is not False:
                return
        self._queues.setdefault(key, deque()).append(value)

    def _pop(self, ticket: Ticket, key: bytes) -> Reply | None:
        if key in self._queues:
            return b"ok", [self._take(key)]
        if ticket in self._popping or ticket in self._missing:
            raise ValueError(f"request {ticket[1]!r} waits already")
        self._popping[ticket] = key
        self._poppers.setdefault(key, deque()).append(ticket)
        return None

    def _take(self, key: bytes) -> bytes:
        queue = self._queues[key]
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        return value

    def _forget_popper(self, ticket: Ticket) -> None:
        key = self._popping.pop(ticket)
        waiting = self._poppers[key]
        waiting.remove(ticket)
        if not waiting:
            del self._poppers[key]

    def _drop(self, ticket: Ticket) -> None:
        """Give up a waiting request; its answer names the keys it still missed."""
        if ticket in self._popping:
            key = self._popping[ticket]
            self._forget_popper(ticket)
            self._answer(ticket, b"missing", [key])
            return
        missing = self._missing.pop(ticket, None)
        if missing is None:
            return
        keys = self._keys_of.pop(ticket)
        for key in missing:
            waiting = self._wanted[key]
            waiting.remove(ticket)
            if not waiting:
                del self._wanted[key]
        self._answer(ticket, b"missing", [key for key in keys if key in missing])


class RequestStore(Store):
    """A store whose methods are requests to a `KeyTable`, here or in another process.

    A subclass brings the requests there, and the answers back.
    """

    def _call(self, op: bytes, *args: bytes) -> Sequence[bytes]:
        """Return the answer to a request that does not wait for a key."""
        raise NotImplementedError

    def _await(
        self, op: bytes, keys: Sequence[str], limit: float
    ) -> tuple[bool, Sequence[bytes]]:
        """Send a request that waits; return whether it was met, and its answer.

        Not met after `limit` seconds, the answer is what it still misses.
        """
        raise NotImplementedError

    def set(self, key: str, value: bytes | str) -> None:
        self._call(b"set", key.encode(), to_bytes(value))

    def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        return self.multi_get([key], timeout)[0]

    def append(self, key: str, value: bytes | str) -> None:
        self._call(b"append", key.encode(), to_bytes(value))

    def multi_get(
        self, keys: Sequence[str], timeout: float | timedelta | None = None
    ) -> list[bytes]:
        limit = self._limit(timeout)
        if not keys:
            return []
        met, values = self._await(b"get", keys, limit)
        if not met:
            raise missing_keys_error([key.decode() for key in values], limit)
        return list(values)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        pairs = to_pairs(keys, values)
        self._call(
            b"sets", *(part for key, value in pairs for part in (key.encode(), value))
        )

    def add(self, key: str, amount: int) -> int:
        return int(
            self._call(b"add", key.encode(), b"%d" % as_int(amount, "add: amount"))[0]
        )

    def compare_set(
        self, key: str, expected: bytes | str, desired: bytes | str
    ) -> bytes:
        frames = key.encode(), to_bytes(expected), to_bytes(desired)
        return self._call(b"swap", *frames)[0]

    def wait(
        self, keys: Sequence[str], timeout: float | timedelta | None = None
    ) -> None:
        self.multi_get(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(b"check", *(key.encode() for key in keys))[0] == b"1"

    def delete_key(self, key: str) -> bool:
        return self._call(b"delete", key.encode())[0] == b"1"

    def num_keys(self) -> int:
        return int(self._call(b"count")[0])

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._call(b"keys")]

    def queue_push(self, key: str, value: bytes | str) -> None:
        self._call(b"push", key.encode(), to_bytes(value))

    def queue_pop(
        self,
        key: str,
        block: bool = True,
        timeout: float | timedelta | None = None,
    ) -> bytes:
        if not block:
            values = self._call(b"pop now", key.encode())
            if not values:
                raise empty_queue_error(key, None)
            return values[0]
        limit = self._limit(timeout)
        met, values = self._await(b"pop", [key], limit)
        if not met:
            raise empty_queue_error(key, limit)
        return values[0]

    def queue_len(self, key: str) -> int:
        return int(self._call(b"queued", key.encode())[0])
