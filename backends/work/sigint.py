"""defer_sigint: a block that no KeyboardInterrupt is raised in the middle of.

Python raises `KeyboardInterrupt` between any two bytecodes of the main thread. A
call of NCCL whose result was not stored would be made again, and a lock that was
just acquired would never be released.
"""

from __future__ import annotations

import threading

# What `signal` wraps: it turns numbers into enums and back, 4 µs each time.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from types import FrameType
from typing import Any

__all__ = ["defer_sigint"]


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
