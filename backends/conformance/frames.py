"""Stack frames of a backend under test, as distinct from those of Rankscope."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

__all__ = ["is_foreign", "is_rule", "where_stuck"]

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
# Frames of one thread that are shown.
_FRAMES = 3
_HERE = Path(__file__).resolve().parent
# The modules of this package that call rules and backends, and have none.
_FRAME_OF_RULES = ("session", "trial")
# What no line of a backend is in: Rankscope, its libraries, the standard library.
_RANKSCOPE = str(_HERE.parent) + os.sep
_STDLIB = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("numpy", "psutil", "zmq"))
_PACKAGES = ("site-packages", "dist-packages")


def is_foreign(file: str) -> bool:
    """Return whether `file` is a backend's, or of a library that the backend uses."""
    if file.startswith(("<", _RANKSCOPE)) or any(one in file for one in _LIBRARIES):
        return False
    return not file.startswith(_STDLIB) or any(one in file for one in _PACKAGES)


def is_rule(file: str) -> bool:
    """Return whether `file` has rules, or calls of ops that rules make."""
    path = Path(file)
    return path.parent == _HERE and path.stem not in _FRAME_OF_RULES


def where_stuck(dump: str) -> str:
    """Return where the threads of a rank are, of a dump that `faulthandler` wrote.

    Threads that run code of the backend are shown, by frames of that code alone,
    the innermost first; without such a thread, the main thread is.
    """
    threads: list[list[tuple[str, str, str]]] = []
    for line in dump.splitlines():
        if "most recent call first" in line:
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            threads[-1].append((found["file"], found["line"], found["name"]))
    if not threads:
        return ""
    foreign = [[frame for frame in one if is_foreign(frame[0])] for one in threads]
    # The thread that handles the signal, the main thread, comes last.
    shown = [one for one in foreign if one] or [threads[-1]]
    return "\n".join(
        "  in "
        + ", called by ".join(
            f"{name} ({file}:{line})" for file, line, name in one[:_FRAMES]
        )
        for one in shown
    )
