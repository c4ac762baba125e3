"""Reservations: the cells of several clients begin in one order on all ranks.

A cell is sent rank by rank. If two clients send at the same time, theirs could begin in
one order on one rank and in the other on the next, and the collectives of the one would
be paired with those of the other. So a client reserves all ranks of a cell before it
sends the cell, and a rank is reserved for the cells of one client at a time.

The client that has assigned the ranks need not ask: it has them for itself until
another one asks for them. Then it yields them, once its cells have ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..wire import requests

__all__ = ["Reservations"]

#: Seconds after which an idle rank gives up a cell that was announced and did not come.
LOST = 10.0
#: Seconds that the client which has an idle rank for itself gets to yield it: it does
#: at once, unless its process is stopped or gone.
GRACE = 2.0


@dataclass(frozen=True)
class _Reservation:
    client: requests.Client
    cell: int | None
    since: float


class Reservations:
    """The cells that this rank is reserved for, all of one client."""

    def __init__(
        self,
        running: Callable[[], tuple[int | None, float] | None],
        on_change: Callable[[], None],
    ) -> None:
        self._running = running
        self._on_change = on_change
        self._held: dict[str, _Reservation] = {}
        self._owner: requests.Client | None = None
        self._wanted_since: float | None = None
        # The control thread reserves, the main thread begins and ends cells.
        self._lock = threading.Lock()

    @property
    def wanted(self) -> bool:
        """Whether the client that has the rank for itself is to yield it."""
        return self._wanted_since is not None

    def assign(self, owner: requests.Client | None) -> None:
        """Let `owner` have the rank for itself, if it is not ``None``."""
        self._owner = owner

    @requests.Reserve.handler
    def _reserve(self, wanted: requests.Reserve) -> requests.Holder | None:
        now = time.monotonic()
        with self._lock:
            holder = self._other(wanted.client["session"], now)
            if holder is None:
                self._held[wanted.key] = _Reservation(wanted.client, wanted.cell, now)
                return None
            first = not self.wanted and self._owner is not None
            if first:
                self._wanted_since = now
        if first:
            self._on_change()
        return holder

    @requests.Release.handler
    def _release(self, wanted: requests.Release) -> None:
        self.end(wanted.key)

    @requests.YieldRank.handler
    def _yield(self, wanted: requests.YieldRank) -> None:
        self._owner = self._wanted_since = None

    def _other(self, session: str, now: float) -> requests.Holder | None:
        running = self._running()
        if running is None:
            # Its client has ended, or lost its connection, before the cell was sent.
            self._held = {
                key: one for key, one in self._held.items() if now - one.since < LOST
            }
            if self._wanted_since is not None and now - self._wanted_since > GRACE:
                self._owner = self._wanted_since = None
        if self._owner is not None and self._owner["session"] != session:
            cell, since = running or (None, now)
            return {"who": self._owner["who"], "cell": cell, "seconds": now - since}
        for held in self._held.values():
            if held.client["session"] != session:
                who = held.client["who"]
                return {"who": who, "cell": held.cell, "seconds": now - held.since}
        return None

    def begin(self, key: str, session: str, cell: int | None) -> str:
        """Begin a cell; return who has the rank if it is another client."""
        now = time.monotonic()
        with self._lock:
            if key in self._held:
                return ""
            holder = self._other(session, now)
            if holder is not None:
                return holder["who"]
            client: requests.Client = {"session": session, "who": "another notebook"}
            if self._owner is not None:
                client = self._owner
            self._held[key] = _Reservation(client, cell, now)
            return ""

    def end(self, key: str) -> None:
        with self._lock:
            self._held.pop(key, None)
