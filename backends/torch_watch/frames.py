"""The user's line of an op: the innermost frame that is no library's."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

from ..work.record_fields import Frame
from ..work.user_code import (
    Place,
    frame_at,
    frame_of,
    frame_of_thread,
    is_installed,
)
from .patching import replace

__all__ = ["calling_frames", "note_submitters", "user_places", "waiting_frames"]

_PACKAGE = __name__.partition(".")[0]
_LIBRARY = "torch"
#: Modules whose decorators and blocks torch puts around its functions.
_WRAPPERS = ("contextlib", "functools", "typing_extensions")
#: Callers of the user's function that are noted.
_CALLERS = 3
#: File → whether its code is not the user's. A name such as <string> may be that of
#: several pieces of code.
_foreign: dict[str, bool] = {}
#: Thread → the user's line that gave it what it runs for torch, and its callers.
_submitters: dict[int, tuple[Frame, ...]] = {}


def note_submitters() -> Callable[[], None]:
    """Note the user's line for what torch gives to a pool; return the undoing.

    As a checkpoint that is saved while the training goes on: the thread that saves it
    has no line of the user's.
    """

    def wrap(original: Any) -> Any:
        def submit(pool: Any, task: Any, /, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            frames = _users(caller) if _package_of(caller) == _LIBRARY else ()
            if not frames:
                return original(pool, task, *args, **kwargs)

            @functools.wraps(task)
            def run(*args: Any, **kwargs: Any) -> Any:
                thread = threading.get_ident()
                _submitters[thread] = frames
                try:
                    return task(*args, **kwargs)
                finally:
                    _submitters.pop(thread, None)

            return original(pool, run, *args, **kwargs)

        return submit

    return replace(ThreadPoolExecutor, "submit", wrap)


def calling_frames() -> tuple[Frame, ...]:
    """Return the user's line that led to this call, and those that led to that one.

    An op that a thread of autograd issues has no such line on that thread: it is the
    line that the main thread waits at.
    """
    return _first_outside(sys._getframe(1), threading.get_ident()) or waiting_frames(
        threading.main_thread().ident
    )


def waiting_frames(thread: int | None) -> tuple[Frame, ...]:
    """Return the user's line at which `thread` waits inside of torch, and its callers.

    For ops that torch issues from C++, as DDP's reducer: the line that called
    ``backward``. Torch's own record of the stack costs a second of CPU time when it is
    first read. Empty where the thread is not inside of torch: its line then says
    nothing about the op. A thread without Python code stands for the main thread.
    """
    frame = frame_of_thread(thread)
    if frame is None:
        thread = threading.main_thread().ident
        frame = frame_of_thread(thread)
    if frame is None or _package_of(frame) not in (_LIBRARY, _PACKAGE):
        return ()
    return _first_outside(frame, thread)


def _first_outside(frame: FrameType | None, thread: int | None) -> tuple[Frame, ...]:
    """Return the user's innermost calls; without one, the one that says most.

    That is the user's call because of which torch runs something in this thread, else
    the innermost call of another library, as in a thread that it started; in a thread
    that torch has started in Python, torch's outermost one.
    """
    found = _users(frame) or _submitters.get(thread or 0, ())
    if found:
        return found
    library = torch = None
    in_thread = False
    while frame is not None:
        package = _package_of(frame)
        if package == _LIBRARY:
            torch = frame
        elif package not in (_PACKAGE, *_WRAPPERS):
            in_thread = in_thread or package == "threading"
            if package not in sys.stdlib_module_names:
                library = library or frame
        frame = frame.f_back
    outside = library or (torch if in_thread else None)
    return () if outside is None else (frame_of(outside),)


def _users(frame: FrameType | None) -> tuple[Frame, ...]:
    """Return the user's innermost call, and its callers; nothing without one."""
    return tuple(frame_at(*place) for place in user_places(frame))


def user_places(frame: FrameType | None) -> list[Place]:
    """Return what `_users` does, without the lines: a search of one takes long."""
    found: list[Place] = []
    known = _foreign
    while frame is not None:
        code = frame.f_code
        foreign = known.get(code.co_filename)
        if foreign is None:
            foreign = _is_foreign(frame)
        if not foreign:
            found.append((code, frame.f_lasti))
            if len(found) > _CALLERS or code.co_name == "<module>":
                break
        frame = frame.f_back
    return found


def _is_foreign(frame: FrameType) -> bool:
    """Return whether the code of `frame` is Rankscope's, torch's or a library's."""
    file = frame.f_code.co_filename
    # Torch's own by the name of the module, as what it compiles has no file.
    ours = _package_of(frame) in (_PACKAGE, _LIBRARY, *_WRAPPERS)
    foreign = ours or is_installed(file)
    if not file.startswith("<"):
        _foreign[file] = foreign
    return foreign


def _package_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]
