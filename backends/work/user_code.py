"""Which code is the user's own, and which is a library's."""

from __future__ import annotations

import sysconfig
from functools import cache
from types import FrameType

__all__ = ["caller_outside_libraries", "is_installed"]


@cache
def _folders() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple(f"{sysconfig.get_path(kind)}/" for kind in kinds)


@cache
def is_installed(file: str) -> bool:
    """Return whether `file` is of an installed package or of Python itself."""
    return file.startswith((*_folders(), "<frozen ")) or (
        "/site-packages/" in file or "/dist-packages/" in file
    )


def caller_outside_libraries(frame: FrameType | None) -> FrameType | None:
    """Return `frame`, or the innermost of its callers that is no library's."""
    while frame is not None and is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
