"""One thread per process that watches descriptors for all groups."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Poller", "poller"]

_log = logging.getLogger(__name__)


class Poller:
    """Calls back, on its thread, when something happens on a descriptor.

    The thread lives as long as anything is watched. Side processes are started
    on it: the kernel kills them when *the thread* that started them ends, and
    a user's thread may end at any moment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._tasks: deque[Callable[[], None]] = deque()
        self._epoll: select.epoll | None = None
        self._wake = -1

    def call(self, task: Callable[[], None]) -> None:
        """Run `task` on the thread, soon."""
        with self._lock:
            self._tasks.append(task)
            if self._epoll is None:
                self._start()
            os.eventfd_write(self._wake, 1)

    def watch(self, fd: int, callback: Callable[[int], None], events: int) -> None:
        """Call ``callback(events)`` on `events`; always on an error or hang-up.

        To be called on the thread, by a task or a callback.
        """
        assert self._epoll is not None
        with self._lock:
            self._callbacks[fd] = callback
            self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Watch `fd` for other events; from any thread."""
        with self._lock:
            if self._epoll is not None and fd in self._callbacks:
                self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; to be called on the thread, before `fd` is closed."""
        assert self._epoll is not None
        with self._lock:
            del self._callbacks[fd]
            self._epoll.unregister(fd)

    def _start(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        threading.Thread(target=self._run, name="rankscope-poller", daemon=True).start()

    def _run(self) -> None:
        assert self._epoll is not None
        while True:
            for fd, events in self._epoll.poll():
                callback = self._callbacks.get(fd)
                if callback is not None:
                    _guarded(lambda: callback(events))  # noqa: B023 - called at once
                elif fd == self._wake:
                    os.eventfd_read(self._wake)
            while self._tasks:
                _guarded(self._tasks.popleft())
            with self._lock:
                if not self._callbacks and not self._tasks:
                    self._epoll.close()
                    os.close(self._wake)
                    self._epoll = None
                    return


def _guarded(task: Callable[[], None]) -> None:
    try:
        task()
    except Exception:  # noqa: BLE001 - the other groups' side processes must still be watched
        _log.exception("a task of the poller failed")


#: The poller of this process.
poller = Poller()
