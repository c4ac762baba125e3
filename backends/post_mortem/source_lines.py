"""The user's line in a recorded stack: the innermost call that is no library's."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from ..observe.evidence import SourceLine
from .evidence_file import only

__all__ = ["MOST_CALLERS", "is_library", "users_line"]

#: Installed packages, Python's own modules, and torch where it was built from source.
_LIBRARY = re.compile(
    r"[/\\](site|dist)-packages[/\\]"
    r"|[/\\]lib(64)?[/\\]python\d+(\.\d+)?[/\\]"
    r"|[/\\]torch[/\\](\w+\.py$|(_\w+|autograd|cuda|distributed|nn|optim|utils)[/\\])"
    r"|^<|^\?\?|\.(cpp|cc|cu|h|hpp|so|pyx)$",
    re.IGNORECASE,
)
#: Callers of the user's line that are kept.
MOST_CALLERS = 3
#: The one name in brackets that is the user's own.
_CELLS = re.compile(r"^<ipython-input")


@lru_cache(maxsize=10_000)
def is_library(file: str) -> bool:
    """Return whether another machine's `file` is a library's, by its path alone."""
    return bool(_LIBRARY.search(file)) and not _CELLS.match(file)


@lru_cache(maxsize=100_000)
def _line(
    file: str, line: int, function: str, callers: tuple[SourceLine, ...] = ()
) -> SourceLine:
    return SourceLine(file, line, function, callers)


def users_line(frames: Any) -> SourceLine | None:
    """Return the user's innermost line of `frames`, which begin with the innermost.

    It has those that called its function. Without it, the outermost line of a library.
    """
    if type(frames) is not list:
        return None
    last = None
    own: list[tuple[str, int, str]] = []
    for frame in frames:
        if type(frame) is not dict:
            return None
        file, line = frame.get("filename"), frame.get("line")
        if type(file) is not str or type(line) is not int:
            return None
        if not file:
            # Ours of an op whose line is not known.
            continue
        last = file, line, only(str, frame.get("name")) or ""
        if not is_library(file):
            own.append(last)
            if last[2] == "<module>" or len(own) > MOST_CALLERS:
                break
    if own:
        return _line(*own[0], tuple(_line(*one) for one in own[1:]))
    return _line(*last) if last else None
