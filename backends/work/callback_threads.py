"""Threads for the callbacks of futures, which may wait for other ops."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

__all__ = ["CallbackThreads", "callback_threads"]

_log = logging.getLogger(__name__)


class CallbackThreads:
    """Daemon threads that run calls; a call that blocks delays no other one.

    One thread would not do: a callback may wait for a future that another callback
    completes. `concurrent.futures.ThreadPoolExecutor` would not do either: at its end
    Python joins the threads of such a pool, and a callback may wait for an op that
    hangs. A thread without a call ends after `linger` seconds.
    """

    def __init__(self, *, linger: float = 1.0) -> None:
        self._linger = linger
        self._ready = threading.Condition()
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._idle = 0

    def submit(self, call: Callable[[], object]) -> None:
        """Run ``call()`` on a thread of its own, at once."""
        with self._ready:
            self._calls.append(call)
            if self._idle >= len(self._calls):
                self._ready.notify()
                return
        thread = threading.Thread(
            target=self._run, name="rankscope-callback", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            # Python starts no threads at its end (3.12).
            with self._ready:
                taken = call in self._calls
                if taken:
                    self._calls.remove(call)
            if taken:
                _run_logged(call)

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._calls:
                    self._idle += 1
                    notified = self._ready.wait(self._linger)
                    self._idle -= 1
                    if not notified and not self._calls:
                        return
                call = self._calls.popleft()
            _run_logged(call)
            # Not kept while the thread waits: it refers to the arrays of an op.
            del call


def _run_logged(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:  # noqa: BLE001 - anybody's code
        _log.exception("a callback of a future")


callback_threads = CallbackThreads()
