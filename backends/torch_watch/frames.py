"""The user's line of an op: the innermost frame that is no library's."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from ..work.record_fields import Frame
from ..work.user_code import is_installed, users_frame

__all__ = ["calling_frames", "waiting_frames"]

_PACKAGE = __name__.partition(".")[0]
_LIBRARY = "torch"
#: Modules whose decorators and blocks torch puts around its functions.
_WRAPPERS = ("contextlib", "functools", "typing_extensions")
#: Callers of the user's function that are noted.
_CALLERS = 3


def calling_frames() -> tuple[Frame, ...]:
    """Return the user's line that led to this call, and those that led to that one.

    An op that a thread of autograd issues has no such line on that thread: it is the
    line that the main thread waits at.
    """
    return _first_outside(sys._getframe(1)) or waiting_frames(
        threading.main_thread().ident
    )


def waiting_frames(thread: int | None) -> tuple[Frame, ...]:
    """Return the user's line at which `thread` waits inside of torch, and its callers.

    For ops that torch issues from C++, as DDP's reducer: the line that called
    ``backward``. Torch's own record of the stack costs a second of CPU time when it is
    first read. Empty where the thread is not inside of torch: its line then says
    nothing about the op. A thread without Python code stands for the main thread.
    """
    frames = sys._current_frames()
    frame = None if thread is None else frames.get(thread)
    if frame is None:
        main = threading.main_thread().ident
        frame = None if main is None else frames.get(main)
    if frame is None or _package_of(frame) not in (_LIBRARY, _PACKAGE):
        return ()
    return _first_outside(frame)


def _first_outside(frame: FrameType | None) -> tuple[Frame, ...]:
    """Return the user's innermost calls; without one, the one that says most.

    That is the innermost call of another library, as in a thread that it started; in a
    thread that torch has started in Python, torch's outermost one.
    """
    library = torch = None
    in_thread = False
    while frame is not None:
        package = _package_of(frame)
        if package == _LIBRARY:
            torch = frame
        elif package not in (_PACKAGE, *_WRAPPERS):
            if not is_installed(frame.f_code.co_filename):
                return _described(frame), *_callers(frame)
            in_thread = in_thread or package == "threading"
            if package not in sys.stdlib_module_names:
                library = library or frame
        frame = frame.f_back
    found = library or (torch if in_thread else None)
    return () if found is None else (_described(found),)


def _callers(frame: FrameType) -> list[Frame]:
    """Return the user's own lines that led to the function of `frame`."""
    found: list[Frame] = []
    while len(found) < _CALLERS and frame.f_code.co_name != "<module>":
        outer = users_frame(frame.f_back)
        if outer is None:
            break
        found.append(_described(outer))
        frame = outer
    return found


def _described(frame: FrameType) -> Frame:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def _package_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]
