"""The watchdog: one thread per process that times ops out.

An op's timeout counts from when it started to execute. An op that never
reported a start is counted from its issue, and only while it is the oldest in
flight: one queued behind a hung op has not had its chance yet.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group_life import GroupLife

__all__ = ["Watchdog", "watchdog"]

_log = logging.getLogger(__name__)

# The thread looks this often while anything is in flight: no deadline is
# missed by more. It goes on for _LINGER afterwards, so that a loop of short
# ops does not wake it, a context switch, for each.
_PERIOD = 0.1
_LINGER = 5.0


class Watchdog:
    """Looks at the groups that have work in flight and times it out."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[GroupLife] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._kick = threading.Event()
        self._idle = True
        self._stopped = False
        self._thread: threading.Thread | None = None

    def register(self, group: GroupLife) -> None:
        """Look after `group` from now on, for as long as it is alive."""
        with self._lock:
            self._stopped = False
            self._groups.add(group)

    def touch(self) -> None:
        """Something was put in flight."""
        if self._idle:
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._stopped:
                return
            self._idle = False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rankscope-watchdog", daemon=True
                )
                self._thread.start()
        self._kick.set()

    def stop(self) -> None:
        """End the thread; the next group that is made may start it again."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopped = True
            self._idle = True
        self._kick.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _run(self) -> None:
        me = threading.current_thread()
        busy_until = time.monotonic() + _LINGER
        while self._thread is me:
            with self._lock:
                groups = list(self._groups)
            if any(group.busy for group in groups):
                busy_until = time.monotonic() + _LINGER
            nearest = min(map(_expire, groups), default=_PERIOD)
            if time.monotonic() < busy_until:
                self._kick.wait(max(0.001, min(_PERIOD, nearest)))
                self._kick.clear()
                continue
            # From here on touch() wakes us. An op issued before this line
            # did not: look once more before going to sleep.
            self._idle = True
            if not any(group.busy for group in groups):
                self._kick.wait()
            self._kick.clear()
            self._idle = False
            busy_until = time.monotonic() + _LINGER


def _expire(group: GroupLife) -> float:
    try:
        return group.expire()
    except Exception:  # noqa: BLE001 - the other groups have deadlines, too
        _log.exception("the watchdog of %r", group)
        return _PERIOD


#: The watchdog of this process.
watchdog = Watchdog()
