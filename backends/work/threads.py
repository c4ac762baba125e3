"""A thread that works while there is something to do, and threads for callbacks."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

__all__ = ["BackgroundLoop", "CallbackThreads", "callback_threads"]

_log = logging.getLogger(__name__)

# Seconds until the next call of a `work` that raised.
_PAUSE_AFTER_ERROR = 0.1


class BackgroundLoop:
    """Calls `work` on a daemon thread, which is started when it is needed.

    ``work()`` returns the seconds until its next call, or ``None`` if there is
    nothing to do. The thread then waits for a `kick` and ends
    after `linger` seconds; the next kick starts another one. An exception of
    ``work()`` is logged, and the loop goes on. While the thread sleeps it refers to
    no local variable of ``work()``.
    """

    def __init__(
        self, name: str, work: Callable[[], float | None], *, linger: float = 0.0
    ) -> None:
        self._name, self._work, self._linger = name, work, linger
        self._lock = threading.Lock()
        self._kicked = threading.Event()
        self._thread: threading.Thread | None = None
        #: Whether nothing calls ``work()`` before the next kick; each op looks at it.
        self.idle = True
        self._stopped = False

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None

    def kick(self) -> bool:
        """Have ``work()`` called now; return whether there is a thread to call it.

        There is none after `stop`, and where Python starts no threads any more (3.12
        and later, at its end).
        """
        with self._lock:
            if self._stopped:
                return False
            self.idle = False
            self._kicked.set()
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                self._thread = thread
                try:
                    thread.start()
                except RuntimeError:
                    self._thread, self.idle = None, True
                    return False
                except BaseException:
                    # An interrupt: the thread may not be there, and if it is, it ends.
                    self._thread, self.idle = None, True
                    raise
            return True

    def kick_if_idle(self) -> None:
        """Kick, unless ``work()`` will be called by itself: for the path of an op.

        Call it after something to do was added: before the thread goes idle,
        ``work()`` is called once more.
        """
        if self.idle:
            self.kick()

    def stop(self, timeout: float | None = None) -> None:
        """End the thread, and wait for its end; kicks do nothing until `resume`."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopped = self.idle = True
            self._kicked.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def resume(self) -> None:
        """Let kicks start the thread again."""
        with self._lock:
            self._stopped = False

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me:
            self._kicked.clear()
            delay = self._call()
            if delay is not None:
                with self._lock:
                    if self._thread is not me:
                        return  # `stop` has said that the loop is idle
                    self.idle = False
                if delay > 0:
                    self._kicked.wait(delay)
            elif not self.idle:
                # From here on callers kick. What was added before this line came
                # without a kick: look once more.
                self.idle = True
            elif not self._kicked.wait(self._linger):
                with self._lock:
                    if self._thread is me and not self._kicked.is_set():
                        self._thread = None

    def _call(self) -> float | None:
        try:
            return self._work()
        except Exception:  # noqa: BLE001 - the loop has other things to do, too
            _log.exception("%s", self._name)
            return _PAUSE_AFTER_ERROR


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
