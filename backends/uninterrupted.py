"""A block that no interrupt of the kernel comes into the middle of.

Python raises `KeyboardInterrupt` between any two bytecodes of the main thread. A
call of NCCL whose outcome is not noted would be made again, and a lock that was
just taken would stay taken.
"""

from __future__ import annotations

import threading

# What `signal` wraps: it turns numbers into enums and back, 4 µs each time.
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from types import FrameType
from typing import Any

__all__ = ["Uninterrupted"]


class Uninterrupted:
    """Within the block, SIGINT is put off until its end; on other threads, nothing.

    A block within another one ends with that one.
    """

    __slots__ = ("_handler",)

    def __init__(self) -> None:
        self._handler: Any = None

    def __enter__(self) -> bool:
        """Whether this is the thread that interrupts come to."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not _block.entered:
            handler = getsignal(SIGINT)
            # Else it is not Python's affair: it stops the process, or nothing.
            if callable(handler):
                _block.came = []
                signal(SIGINT, _block.note)
                _block.entered = True
                self._handler = handler
        return True

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            _block.entered = False
            signal(SIGINT, self._handler)
            for frame in _block.came:
                self._handler(SIGINT, frame)


class _Block:
    """The one that the main thread is in."""

    def __init__(self) -> None:
        self.entered = False
        self.came: list[FrameType | None] = []

    def note(self, signum: int, frame: FrameType | None) -> None:
        self.came.append(frame)


_block = _Block()
