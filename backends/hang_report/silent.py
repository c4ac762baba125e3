"""What a rank can tell that runs no Python any more: its GIL is held, or it crashes.

`faulthandler` writes the stacks from a signal handler in C. The signal by which a peer
asks for them is one of the real-time signals, which programs hardly use, and it is sent
to those alone that have the handler.

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
from pathlib import Path
from typing import IO

from .c_signals import handle_by, is_free, is_handled_by, sleep

__all__ = ["SilentStacks", "request_stacks"]


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
            self._file = path.open("w")
            faulthandler.register(number, self._file, all_threads=True, chain=False)
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
        """Put back what was before."""
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


def request_stacks(pid: int, number: int) -> None:
    """Send a rank its signal; nothing happens if its process has ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)
