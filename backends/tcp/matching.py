"""Matching: which message goes to which receive. No socket is touched here."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..messaging.algorithms import Flat
from ..messaging.signature import SHIFT, is_over
from ..messaging.transport import ANY_SOURCE, TRUNCATED, Received

__all__ = ["Arrival", "Matching", "Request", "TruncationError"]

# A receive matches the tag of a message; the signature above it is compared later.
_TAG = (1 << SHIFT) - 1


class TruncationError(Exception):
    """A message is longer than the array that was to receive it."""

    def __init__(self, message: Received) -> None:
        super().__init__(TRUNCATED)
        self.message = message


class Request:
    """A send or a receive in flight."""

    __slots__ = (
        *("array", "connection", "done", "error", "nbytes", "order", "source"),
        *("tag", "view", "wanted"),
    )

    def __init__(
        self, array: Flat, connection: Any, wanted: int = ANY_SOURCE, tag: int = 0
    ) -> None:
        self.array = array
        #: The bytes of `array`.
        self.view = memoryview(array)
        #: The `Connection` that it waits for; ``None``: any.
        self.connection = connection
        #: For a receive the source that was asked for, and what has come from where.
        self.wanted = self.source = wanted
        self.tag = tag
        self.nbytes = 0
        self.order = 0
        self.done = False
        self.error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        """Mark the request as over."""
        self.error = error
        self.done = True


class Arrival:
    """A message that no receive had asked for when it came."""

    __slots__ = (
        *("claimed", "data", "nbytes", "offer", "order", "source", "tag", "whole"),
    )

    def __init__(
        self, source: int, tag: int, nbytes: int, offer: tuple[int, int] | None
    ) -> None:
        self.source, self.tag, self.nbytes, self.offer = source, tag, nbytes, offer
        self.data = memoryview(bytearray(nbytes if offer is None else 0))
        #: Whether all bytes are here, and the receive that waits for the rest.
        self.whole = False
        self.claimed: Request | None = None
        self.order = 0


class Matching:
    """The receives that wait for a message, and the messages that wait for one.

    Messages of one rank with the same tag match in the order in which they were sent,
    receives in the order in which they were posted.
    """

    def __init__(self) -> None:
        self._order = itertools.count()
        # By source and tag.
        self._posted: dict[tuple[int, int], collections.deque[Request]] = {}
        self._early: dict[tuple[int, int], collections.deque[Arrival]] = {}
        #: Messages of collectives, which have a signature; `_early` has the others.
        self.signed: dict[tuple[int, int], collections.deque[Arrival]] = {}

    def post(self, request: Request) -> Arrival | None:
        """Return the message that `request` receives; else have it wait for one."""
        tag = request.tag & _TAG
        early = self._early if request.tag == tag else self.signed
        if early:
            arrival = _earliest(early, request.wanted, tag)
            if arrival is not None:
                found = early[arrival.source, tag]
                found.remove(arrival)
                if not found:
                    del early[arrival.source, tag]
                return arrival
        request.order = next(self._order)
        key = request.wanted, tag
        waiting = self._posted.get(key)
        if waiting is None:
            waiting = self._posted[key] = collections.deque()
        waiting.append(request)
        return None

    def match(self, source: int, tag: int) -> Request | None:
        """Return the receive that takes a message of `source` that has come now."""
        tag &= _TAG
        posted = self._posted
        waiting = posted.get((source, tag))
        anyone = posted.get((ANY_SOURCE, tag))
        if anyone and (not waiting or anyone[0].order < waiting[0].order):
            waiting = anyone
        if not waiting:
            return None
        request = waiting.popleft()
        if not waiting:
            del posted[request.wanted, tag]
        return request

    def keep(self, arrival: Arrival) -> None:
        """Keep a message for which `match` has found no receive."""
        arrival.order = next(self._order)
        tag = arrival.tag & _TAG
        early = self._early if arrival.tag == tag else self.signed
        early.setdefault((arrival.source, tag), collections.deque()).append(arrival)

    def unread(self, tag: int) -> Arrival | None:
        """Return a message of the collective with `tag`, or of one before."""
        for found in self.signed.values():
            # The first one of its rank and kind is the oldest.
            if is_over(found[0].tag, tag):
                return found[0]
        return None

    def lose(self, source: int, last: bool) -> Iterator[Request]:
        """Drop what only `source` could bring; yield the receives that wait for it.

        Those of any source wait on, unless it was the `last` of the other ranks. The
        messages that have come as a whole stay.
        """
        for early in (self._early, self.signed):
            for key in [key for key in early if key[0] == source]:
                whole = [one for one in early.pop(key) if one.whole]
                if whole:
                    early[key] = collections.deque(whole)
        sources = (source, ANY_SOURCE) if last else (source,)
        for found in [key for key in self._posted if key[0] in sources]:
            yield from self._posted.pop(found)


def _earliest(
    early: Mapping[tuple[int, int], Sequence[Arrival]], source: int, tag: int
) -> Arrival | None:
    if source != ANY_SOURCE:
        found = early.get((source, tag))
        return found[0] if found else None
    heads = [found[0] for (_, one), found in early.items() if one == tag]
    return min(heads, key=lambda arrival: arrival.order, default=None)


def as_bytes(array: Flat) -> Flat:
    """Return the bytes of the flat `array`: not every dtype has a buffer."""
    return array if array.dtype is _BYTES else array.view(_BYTES)


_BYTES = np.dtype(np.uint8)
