"""Which code is the user's own, and which is a library's or Rankscope's."""

from __future__ import annotations

import os
import sys
from functools import cache
from types import CodeType, CoroutineType, FrameType
from typing import Any

from .record_fields import Frame

__all__ = [
    "Place",
    "calls_of_loop",
    "calls_of_task",
    "frame_at",
    "frame_of",
    "frame_of_thread",
    "is_installed",
    "is_ours",
    "users_frame",
]

#: Code, and the offset of the instruction in it that runs.
Place = tuple[CodeType, int]

_PACKAGE = f"{__name__.partition('.')[0]}."


# Not by `sysconfig`, which reads a file: a process may have no descriptor left.
_STDLIB = f"{os.path.dirname(os.__file__)}/"


@cache
def is_installed(file: str) -> bool:
    """Return whether `file` is of an installed package or of Python itself."""
    return file.startswith((_STDLIB, "<frozen ")) or (
        "/site-packages/" in file or "/dist-packages/" in file
    )


# Whether the code of a file is a library's or Rankscope's. A name such as <string> may
# be that of several pieces of code.
_foreign: dict[str, bool] = {}


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return `frame`, or the innermost of its callers that is the user's own."""
    # Each op walks over some ten frames.
    known = _foreign
    while frame is not None:
        file = frame.f_code.co_filename
        foreign = known.get(file)
        if foreign is None:
            foreign = is_ours(frame) or is_installed(file)
            if not file.startswith("<"):
                known[file] = foreign
        if not foreign:
            return frame
        frame = frame.f_back
    return None


def frame_at(code: CodeType, offset: int) -> Frame:
    """Return the frame that runs the instruction of `code` at `offset`."""
    lines = (line for begin, end, line in code.co_lines() if begin <= offset < end)
    return code.co_filename, next(lines, None) or code.co_firstlineno, code.co_name


def frame_of(frame: FrameType) -> Frame:
    """Return the line that `frame` is at."""
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def frame_of_thread(ident: int | None) -> FrameType | None:
    """Return the innermost frame of a thread; ``None`` where it runs no Python code.

    No variable has all frames: with its own one that would be a cycle, which keeps what
    every thread has had in its functions. Python 3.12.1 ends the process by SIGSEGV as
    it collects the buffer of a BytesIO, as one has in a send of a pipe.
    """
    return sys._current_frames().get(ident or 0)


def calls_of_loop(frame: FrameType | None) -> list[FrameType]:
    """Return the calls of the task that a thread's ``asyncio.run`` waits for.

    The innermost is the last. `frame` is the thread's innermost one; empty where that
    is not the loop's own: while all tasks await something, they are on no stack.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in ("asyncio", "selectors"):
            break
        if frame.f_code.co_name == "run_until_complete":
            return calls_of_task(frame.f_locals.get("future"))
        frame = frame.f_back
    return []


def calls_of_task(task: Any) -> list[FrameType]:
    """Return the calls of a task that awaits something, the innermost last."""
    calls = []
    awaited = task.get_coro() if hasattr(task, "get_coro") else None
    while isinstance(awaited, CoroutineType) and (frame := awaited.cr_frame):
        calls.append(frame)
        awaited = awaited.cr_await
    return calls


def is_ours(frame: FrameType) -> bool:
    """Return whether the code of `frame` is Rankscope's."""
    # By the name of the module: the folders of the package differ when it is mapped.
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(_PACKAGE)
