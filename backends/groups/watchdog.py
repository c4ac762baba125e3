"""The watchdog: one thread per process that times ops out.

An op's timeout counts from when it started to execute. An op that never
reported a start is counted from its issue, and only while it is the oldest in
flight: an op behind a hung one cannot start.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import Protocol

from ..work.threads import BackgroundLoop

__all__ = ["Watchdog", "Watched", "watchdog"]

_log = logging.getLogger(__name__)

# Seconds between two checks while anything is in flight: the largest delay of a
# timeout. While the nearest deadline stays the same, nothing happens, and the period
# grows by a factor up to the longest. The checks go on for _LINGER seconds after the
# last op, so that a loop of short ops does not wake the thread, a context switch, for
# each op.
_PERIOD, _PERIOD_MAX, _GROWTH = 0.1, 0.25, 1.2
_LINGER = 5.0
# Seconds by which two readings of one deadline may differ.
_SAME = 1e-3
# Seconds for which the thread then waits for the next op before it ends.
_REST = 3600.0


class Watched(Protocol):
    """The part of a group's generation that the watchdog uses."""

    @property
    def busy(self) -> bool:
        """Whether an op is in flight, or is being handed to a backend."""

    def expire(self) -> float:
        """Time out overdue ops; return the seconds to the next deadline."""


class Watchdog(BackgroundLoop):
    """Checks the groups that have ops in flight and times overdue ops out.

    The watchdog keeps no group alive: it holds weak references, and its thread
    sleeps without a strong one. After `stop`, the next group that is made may start the
    thread again.
    """

    def __init__(self) -> None:
        super().__init__("rankscope-watchdog", self._check, linger=_REST)
        self._groups: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._groups_lock = threading.Lock()
        self._busy_at = 0.0
        self._period, self._deadline = _PERIOD, 0.0

    def register(self, group: Watched) -> None:
        """Watch `group` for as long as it is alive."""
        with self._groups_lock:
            self._groups.add(group)
        self.resume()

    def wake(self) -> None:
        """Check the groups now: something has happened to one.

        An op does so if the watchdog is `idle`; its group is `busy` already. The op may
        be over when the thread looks: it lingers all the same.
        """
        self._busy_at = time.monotonic()
        self.kick()

    def _check(self) -> float | None:
        with self._groups_lock:
            groups = list(self._groups)
        if any(group.busy for group in groups):
            self._busy_at = time.monotonic()
        nearest = min(map(_expire, groups), default=_PERIOD)
        now = time.monotonic()
        was, self._deadline = self._deadline, now + nearest
        still = abs(self._deadline - was) < _SAME
        self._period = min(self._period * _GROWTH, _PERIOD_MAX) if still else _PERIOD
        if now - self._busy_at < _LINGER:
            return max(0.001, min(self._period, nearest))
        return None


def _expire(group: Watched) -> float:
    try:
        return group.expire()
    except Exception:  # noqa: BLE001 - the other groups have deadlines, too
        _log.exception("the watchdog failed on %r", group)
        return _PERIOD


#: The watchdog of this process.
watchdog = Watchdog()
# A forked child has neither the thread nor the groups.
os.register_at_fork(after_in_child=watchdog.__init__)  # type: ignore[misc]
