"""Handlers of signals as the C library has them, set from any thread.

`signal.signal` is for the main thread alone, which may be in an op, and it takes no
function in C.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

__all__ = [
    "PausedHandler",
    "end_by",
    "handle_by",
    "is_free",
    "is_handled_by",
    "send_to_thread",
    "sleep",
]

#: Bytes that hold a ``struct sigaction`` of any system; all zero it is the default.
_SIGACTION = 512


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def sleep() -> Any:
    return _libc().sleep


def is_free(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL


def handle_by(number: int, function: Any) -> None:
    """Have a signal handled by a function of the C library; None: by its default."""
    set_handler = _libc().signal
    set_handler.argtypes = ctypes.c_int, ctypes.c_void_p
    set_handler.restype = ctypes.c_void_p
    address = None if function is None else ctypes.cast(function, ctypes.c_void_p)
    set_handler(number, address)


def is_handled_by(number: int, function: Any) -> bool:
    now = ctypes.create_string_buffer(_SIGACTION)
    if _libc().sigaction(number, None, now) != 0:
        return False
    # The handler is the first member on every system with glibc or musl.
    address = ctypes.cast(function, ctypes.c_void_p).value
    return ctypes.c_void_p.from_buffer(now).value == address


def end_by(number: int) -> None:
    handle_by(number, None)
    os.kill(os.getpid(), number)
    # Another thread may take it: this one does nothing more.
    time.sleep(1)


def send_to_thread(pid: int, thread: int, number: int) -> bool:
    """Send a signal to one thread of a process; return whether it is there."""
    # glibc has it since 2.30.
    send = getattr(_libc(), "tgkill", None)
    return send is not None and send(pid, thread, number) == 0


class PausedHandler:
    """Puts the handler of a signal aside for a while: the default counts meanwhile.

    A child that is forked meanwhile has the default from its first moment on.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._saved: Any = None
        #: Threads that fork now.
        self._pauses = 0

    def pause(self) -> None:
        self._pauses += 1
        if self._saved is not None:
            return
        saved = ctypes.create_string_buffer(_SIGACTION)
        default = ctypes.create_string_buffer(_SIGACTION)
        if _libc().sigaction(self._number, default, saved) == 0:
            self._saved = saved

    def resume(self) -> None:
        """Put it back, once no other thread needs it aside."""
        self._pauses = max(0, self._pauses - 1)
        if self._pauses == 0 and self._saved is not None:
            saved, self._saved = self._saved, None
            _libc().sigaction(self._number, saved, None)

    def forget(self) -> None:
        """Leave it aside for ever."""
        self._pauses, self._saved = 0, None
