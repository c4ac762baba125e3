"""What a rank can tell that runs no Python any more: its GIL is held, or it crashes.

`faulthandler` writes the stacks from a signal handler in C. The signal by which a peer
asks for them is one of the real-time signals, which programs hardly use, and it is sent
to those alone that have the handler. A thread writes its own stack and no other: who is
asked may be slow and not stuck, and to read the frames of a thread that runs meanwhile
ends the process by SIGSEGV. So each thread has a signal of its own.

A C++ library that gives up calls ``abort``, on a thread of its own: gloo where sizes
differ, NCCL at a timeout. There the other threads still run, and have the records
that tell why. ``sleep`` of the C library as the handler of SIGABRT, below that of
`faulthandler`, holds up the end for so many seconds as the signal's number says, which
is 6. In a crash `faulthandler` takes its own handler away before it writes the stacks,
into whichever file the program wants: `has_crashed` shows that to a thread, which ends
the process as soon as the report is written.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from .c_signals import handle_by, is_free, is_handled_by, send_to_thread, sleep
from .polling import until

__all__ = ["Silent", "SilentStacks", "other_threads", "request_stacks"]

#: Threads beside the main one whose stacks peers can ask for.
MOST_THREADS = 24


class SilentStacks:
    """Has this process write its stacks into `path` when it gets `signal`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: The number of the signal; None: there is none.
        self.signal: int | None = None
        self._file: IO[str] | None = None
        self._enabled = self._of_crash = False
        self._sleep = sleep()
        number = _signal()
        if number is None:
            return
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            path.unlink(missing_ok=True)
            # A peer may take back what does not end with the main thread.
            self._file = path.open("a")
            faulthandler.register(number, self._file, all_threads=False, chain=False)
            self.signal = number
            if not faulthandler.is_enabled():
                self._of_crash = is_free(signal.SIGABRT)
                if self._of_crash:
                    handle_by(signal.SIGABRT, self._sleep)
                # It calls that handler when it has written the stacks.
                faulthandler.enable(self._file, all_threads=True)
                self._enabled = True

    def is_mine(self) -> bool:
        """Whether the program has not taken the signal for itself."""
        return self.signal is not None and is_free(self.signal)

    def has_crashed(self) -> bool:
        """Whether the process is about to end by SIGABRT."""
        # The program may have disabled `faulthandler`.
        return (
            self._of_crash
            and faulthandler.is_enabled()
            and is_handled_by(signal.SIGABRT, self._sleep)
        )

    def forget(self) -> None:
        """Let the process end by a signal as it would have without this."""
        of_crash, self._of_crash = self._of_crash, False
        if self._enabled:
            self._enabled = False
            faulthandler.disable()
        if of_crash and is_free(signal.SIGABRT):
            handle_by(signal.SIGABRT, None)

    def close(self) -> None:
        if self.signal is not None and self.is_mine():
            faulthandler.unregister(self.signal)
        self.signal = None
        self.forget()
        if self._file is not None:
            self._file.close()


def _signal() -> int | None:
    if not hasattr(signal, "SIGRTMAX"):
        return None
    # The last ones are those of valgrind and of other tools.
    numbers = range(signal.SIGRTMAX - 8, signal.SIGRTMIN, -1)
    return next(filter(is_free, numbers), None)


def other_threads() -> list[int]:
    """Return the system's ids of Python's threads, but for the main one and this."""
    but = threading.main_thread(), threading.current_thread()
    found = (one.native_id for one in threading.enumerate() if one not in but)
    return [one for one in found if one is not None][:MOST_THREADS]


class Silent(NamedTuple):
    """A rank that does not answer, and how its stacks are asked for."""

    pid: int
    signal: int
    #: Those of `other_threads`, as it last told.
    threads: list[int]
    #: Where they go.
    path: Path

    def written(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


def request_stacks(silent: Sequence[Silent], seconds: float) -> None:
    """Have ranks write their stacks, the main thread's last.

    Waits `seconds` for those, and as long for the stacks of other threads. Of a rank
    whose main thread does not write there are none.
    """
    before = [one.written() for one in silent]
    for one in silent:
        send_to_thread(one.pid, one.pid, one.signal)
    until(
        lambda: all(
            one.written() > old for one, old in zip(silent, before, strict=True)
        ),
        seconds,
    )
    # Until all of it is there.
    time.sleep(0.05)
    deadline = time.monotonic() + seconds
    for one, old in zip(silent, before, strict=True):
        with_main = one.written()
        if with_main == old:
            continue
        asked = [_is_written(one, thread, deadline) for thread in one.threads]
        # A reader takes the last one for the main thread.
        if any(asked) and not _is_written(one, one.pid, time.monotonic() + seconds):
            with contextlib.suppress(OSError):
                os.truncate(one.path, with_main)


def _is_written(silent: Silent, thread: int, deadline: float) -> bool:
    """Have one thread write its stack; return whether it did."""
    before = silent.written()
    if time.monotonic() > deadline or not send_to_thread(
        silent.pid, thread, silent.signal
    ):
        return False
    if not until(lambda: silent.written() > before, deadline - time.monotonic(), 0.001):
        return False
    time.sleep(0.005)
    return True
