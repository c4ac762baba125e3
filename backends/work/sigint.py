"""Where no KeyboardInterrupt is raised: in a block, and in Rankscope's code at work.

Python raises `KeyboardInterrupt` between any two bytecodes of the main thread. A
call of NCCL whose result was not stored would be made again, and a lock that was
just acquired would never be released: CPython 3.14 checks for signals between
``__enter__`` and the block of its ``with``.
"""

from __future__ import annotations

import threading
import time

# What `signal` wraps: it turns numbers into enums and back, 4 µs each time.
from _signal import (  # type: ignore[import-not-found]
    SIGINT,
    getsignal,
    pthread_kill,
    signal,
)
from _thread import start_new_thread
from types import FrameType
from typing import Any

from .user_code import is_ours, users_frame

__all__ = ["defer_sigint", "interrupt"]

#: Seconds until an interrupt that was put off is sent again, and how often it may come.
#: No time bounds that: on a loaded machine a thread may stand amid an op for long.
_AGAIN, _LONGEST_PAUSE = 0.001, 0.1
_MOST = 40


class defer_sigint:
    """Within the block, SIGINT is deferred to its end; no effect on other threads.

    ``with`` returns whether this is the main thread, the only one that Python
    interrupts. A block within another one ends with the outer one.
    """

    __slots__ = ("_handler",)

    def __init__(self) -> None:
        self._handler: Any = None

    def __enter__(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return False
        if not _deferral.active:
            handler = getsignal(SIGINT)
            # Otherwise Python does not handle it: it ends the process, or is ignored.
            if callable(handler):
                _deferral.frames = []
                signal(SIGINT, _deferral.note)
                _deferral.active = True
                self._handler = handler
        return True

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            _deferral.active = False
            signal(SIGINT, self._handler)
            for frame in _deferral.frames:
                self._handler(SIGINT, frame)


class _Deferral:
    """The outermost block that the main thread is in, and the signals it received."""

    def __init__(self) -> None:
        self.active = False
        self.frames: list[FrameType | None] = []

    def note(self, signum: int, frame: FrameType | None) -> None:
        self.frames.append(frame)


_deferral = _Deferral()


class _Interrupt:
    """What a handler of SIGINT calls: it raises KeyboardInterrupt, or puts it off.

    While Rankscope's code is at work on the main thread, it is put off: to the end of
    the issue of an op, or until that code stands still, as it waits for something.
    """

    def __init__(self) -> None:
        #: Whether one is put off: read at the end of each issue, on any thread.
        self.is_put_off = False
        self._at: tuple[FrameType, int] | None = None
        self._times = 0
        self._is_sent = False
        self._is_handled = False

    def __call__(self, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt in `frame`, the main thread's innermost, or later.

        It is sent again a millisecond later, and raised when it has come 40 times.
        """
        is_sent, self._is_sent = self._is_sent, False
        # Sent again while this ran, or when it was raised or cancelled meanwhile.
        if self._is_handled or (is_sent and not self.is_put_off):
            return
        self._is_handled = True
        try:
            if frame is not None and self._is_for_later(frame):
                return
        finally:
            self._is_handled = False
        self.cancel()
        raise KeyboardInterrupt

    def raise_put_off(self) -> None:
        """Raise one that was put off; nothing on another thread than the main one."""
        if threading.current_thread() is threading.main_thread():
            self.cancel()
            raise KeyboardInterrupt

    def cancel(self) -> None:
        """Forget one that was put off: what it was for has ended."""
        self.is_put_off, self._at, self._times = False, None, 0

    def _is_for_later(self, frame: FrameType) -> bool:
        at = (frame, frame.f_lasti)
        if not _is_within_ours(frame) or at == self._at or self._times == _MOST:
            return False
        self._at = at
        self._times += 1
        if not self.is_put_off:
            self.is_put_off = True
            # `Thread.start` waits for the thread, which waits for a lock that the main
            # thread has where this is handled in the midst of another such call.
            start_new_thread(self._send_again, (threading.get_ident(),))
        return True

    def _send_again(self, thread: int) -> None:
        pause = _AGAIN
        while True:
            time.sleep(pause)
            if not self.is_put_off:
                return
            if self._is_sent:
                # The thread is in a call that does not end for a signal.
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause, self._is_sent = _AGAIN, True
            pthread_kill(thread, SIGINT)


interrupt = _Interrupt()


def _is_within_ours(frame: FrameType) -> bool:
    """Whether `frame` is Rankscope's, or was called by it, on behalf of the user's."""
    users = users_frame(frame)
    at: FrameType | None = frame
    while at is not None and at is not users:
        if is_ours(at):
            return True
        at = at.f_back
    return False
