"""One thread per process that watches descriptors for all groups."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["FdPoller", "poller"]

_log = logging.getLogger(__name__)


class FdPoller:
    """Calls back, on its thread, when an event occurs on a descriptor.

    The thread lives as long as any descriptor is watched. Side processes are
    started on it: the kernel kills them when *the thread* that started them
    ends, and a user's thread may end at any moment.

    A callback or task must not wait for another thread: every group's side
    process depends on this one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._tasks: deque[Callable[[], None]] = deque()
        self._epoll: select.epoll | None = None
        self._wake = -1

    def call(self, task: Callable[[], None]) -> None:
        """Run `task` on the thread, soon; `OSError` if no thread can be started."""
        with self._lock:
            if self._epoll is None:
                self._start()
            self._tasks.append(task)
            os.eventfd_write(self._wake, 1)

    def watch(self, fd: int, callback: Callable[[int], None], events: int) -> None:
        """Call ``callback(events)`` on `events`, and on an error or hang-up.

        Call this on the thread, from a task or a callback.
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
        """Stop watching `fd`. Call this on the thread, before `fd` is closed."""
        assert self._epoll is not None
        with self._lock:
            del self._callbacks[fd]
            self._epoll.unregister(fd)

    def _start(self) -> None:
        epoll = select.epoll()
        try:
            wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                epoll.register(wake, select.EPOLLIN)
                self._epoll, self._wake = epoll, wake
                threading.Thread(
                    target=self._run, name="rankscope-poller", daemon=True
                ).start()
            except BaseException:
                self._epoll = None
                os.close(wake)
                raise
        except BaseException:
            epoll.close()
            raise

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
poller = FdPoller()
