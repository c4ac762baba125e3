"""Sleeper: threads that sleep on the descriptors of a transport, and their bell."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
from collections.abc import Callable

__all__ = ["Sleeper"]

# A sleep ends now and then, in case its wake-up went to another thread.
_LONGEST = 0.25


class Sleeper:
    """What the waiters of one transport sleep on; see `Transport`.

    It may end while threads sleep: the last of them closes the descriptors.
    """

    def __init__(self) -> None:
        #: Held while it ends; recursive, as a signal handler may abort.
        self.guard = threading.RLock()
        self.ended = False
        self._count = 0
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        #: The descriptors, of which the bell has no data.
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._bell, selectors.EVENT_READ)

    def arm(self) -> bool:
        """Silence the bell; return whether there may be a sleep."""
        with self.guard:
            if self.ended:
                return False
            with contextlib.suppress(BlockingIOError):  # nobody has called wake()
                self._bell.recv(4096)
        return True

    def sleep(self, timeout: float, *, bell_alone: bool = False) -> None:
        """Wait for the descriptors, or for the bell alone, up to `timeout` seconds."""
        counted = False
        try:
            with self.guard:
                if self.ended:
                    return
                self._count += 1
                counted = True
            if bell_alone:
                bell = select.poll()
                bell.register(self._bell, select.POLLIN)
                bell.poll(timeout * 1e3)
            else:
                self.selector.select(min(timeout, _LONGEST))
        finally:
            if counted:
                with self.guard:
                    self._count -= 1
                    if self.ended and not self._count:
                        self._close()

    def wake(self) -> None:
        """End the sleep of all threads, or the next one."""
        with self.guard:
            if not self.ended:
                with contextlib.suppress(BlockingIOError):  # it rings already
                    self._button.send(b"\0")

    def fileno(self) -> int | None:
        """Return the descriptor of them all, if the system has one."""
        with self.guard:
            fileno = getattr(self.selector, "fileno", None)
            return None if self.ended or fileno is None else int(fileno())

    def end(self, close: Callable[[], None]) -> None:
        """Wake all threads for good, and call ``close()``; does so once."""
        with self.guard:
            if self.ended:
                return
            self.wake()
            self.ended = True
            close()
            if not self._count:
                self._close()

    def disown(self) -> None:
        """In a forked child: close the descriptors, whatever threads the parent has."""
        self.guard, self._count, self.ended = threading.RLock(), 0, True
        self._close()

    def _close(self) -> None:
        self.selector.close()
        self._bell.close()
        self._button.close()
