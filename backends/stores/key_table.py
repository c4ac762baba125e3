"""KeyTable: the keys of a store and the requests that wait for them, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ..errors import DistStoreError
from .base import UNKNOWN_END

__all__ = ["NEXT_NUMBER", "KeyTable", "Reply", "Ticket"]

#: Most digits of a store's integer: to parse a million digits takes minutes.
MAX_DIGITS = 1000
#: Most bytes of a value that grows by `Store.append`.
MAX_VALUE = 128 << 20

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
        values = self._values
        answer: list[bytes] = []
        match op, args:
            case b"set", [key, value]:
                self._put(key, value)
            case b"get", _:
                return self._get(ticket, args)
            case b"append", [key, value]:
                whole = values.get(key, b"") + value
                if len(whole) > MAX_VALUE:
                    raise DistStoreError(
                        f"append: the value of {key!r} would have {len(whole)} bytes, "
                        f"more than a store takes ({MAX_VALUE})"
                    )
                self._put(key, whole)
            case b"sets", _:
                for key, value in list(zip(args[::2], args[1::2], strict=True)):
                    self._put(key, value)
            case b"keys", []:
                answer = list(values)
            case b"push", [key, value]:
                self._push(key, value)
            case b"pop", [key]:
                return self._pop(ticket, key)
            case b"pop now", [key]:
                answer = [self._take(key)] if key in self._queues else []
            case b"queued", [key]:
                answer = [b"%d" % len(self._queues.get(key, ()))]
            case b"add", [key, amount]:
                if len(amount) > MAX_DIGITS:
                    raise ValueError(f"add: an amount of {len(amount)} digits")
                answer = [self._add(key, int(amount))]
            case b"swap", [key, expected, desired]:
                if values.get(key, b"") == expected:
                    self._put(key, desired)
                answer = [values.get(key, expected)]
            case b"check", _:
                answer = [b"1" if all(key in values for key in args) else b"0"]
            case b"delete", [key]:
                answer = [b"0" if values.pop(key, None) is None else b"1"]
            case b"clear", [start]:
                for key in [one for one in values if one.startswith(start)]:
                    del values[key]
            case b"count", []:
                answer = [b"%d" % len(values)]
            case b"will", _:
                left = dict(zip(args[::2], args[1::2], strict=True))
                wills = self.wills.setdefault(ticket[0], {})
                for key, value in left.items():
                    wills.pop(key, None)
                    if value:
                        wills[key] = value
            case b"unwill", []:
                self.wills.pop(ticket[0], None)
            case b"drop", [number]:
                self._drop((ticket[0], number))
                return None
            case _:
                raise ValueError(f"unknown operation {op!r} of {len(args)} arguments")
        return b"ok", answer

    def execute(self, client: bytes, end: str | None = None) -> None:
        """Set the last wills of `client`, which has died; `end` says how, if known."""
        wills = self.wills.pop(client, {}).items()
        # The places in rows last, and in the order in which they were registered.
        for key, value in sorted(wills, key=lambda one: one[0].endswith(NEXT_NUMBER)):
            if key.endswith(NEXT_NUMBER):
                counter = key.removesuffix(NEXT_NUMBER)
                key = b"%s/%s" % (counter, self._add(counter, 1))
            if not self._values.get(key):
                if end is not None:
                    value = value.replace(UNKNOWN_END.encode(), end.encode())
                self._put(key, value)

    def _add(self, key: bytes, amount: int) -> bytes:
        """Add `amount` to the integer at `key` (absent: 0); return the sum."""
        value = self._values.get(key, b"0") or b"0"
        try:
            if len(value) > MAX_DIGITS:
                raise ValueError(f"{len(value)} bytes")
            if b"_" in value:
                raise ValueError("Python's own form of an integer")
            total = b"%d" % (int(value) + amount)
        except ValueError as error:
            raise DistStoreError(
                f"add: key {key.decode()!r} holds {value[:32]!r}, which is no integer"
            ) from error
        self._put(key, total)
        return total

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
