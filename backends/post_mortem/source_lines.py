"""The user's line in a recorded stack: the innermost call that is no library's."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from ..observe.evidence import SourceLine

__all__ = ["is_library", "users_line"]

#: Installed packages, Python's own modules, and torch where it was built from source.
_LIBRARY = re.compile(
    r"[/\\](site|dist)-packages[/\\]"
    r"|[/\\]lib(64)?[/\\]python\d+(\.\d+)?[/\\]"
    r"|[/\\]torch[/\\](\w+\.py$|(_\w+|autograd|cuda|distributed|nn|optim|utils)[/\\])"
    r"|^<|^\?\?|\.(cpp|cc|cu|h|hpp|so|pyx)$",
    re.IGNORECASE,
)
#: The one name in brackets that is the user's own.
_CELLS = re.compile(r"^<ipython-input")


@lru_cache(maxsize=10_000)
def is_library(file: str) -> bool:
    """Return whether `file` belongs to a library or to Python, by its path alone.

    The paths are those of another machine.
    """
    return bool(_LIBRARY.search(file)) and not _CELLS.match(file)


@lru_cache(maxsize=100_000)
def _line(file: str, line: int, function: str) -> SourceLine:
    return SourceLine(file, line, function)


def users_line(frames: Any) -> SourceLine | None:
    """Return the user's innermost line of `frames`, which begin with the innermost.

    Without one, the outermost line of a library.
    """
    if type(frames) is not list:
        return None
    last = None
    for frame in frames:
        if type(frame) is not dict:
            return None
        file, line = frame.get("filename"), frame.get("line")
        if type(file) is not str or type(line) is not int:
            return None
        last = frame
        if not is_library(file):
            break
    if last is None:
        return None
    return _line(last["filename"], last["line"], str(last.get("name", "")))
