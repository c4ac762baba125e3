"""Which code is the user's own, and which is a library's or Rankscope's."""

from __future__ import annotations

import os
from functools import cache
from types import FrameType

__all__ = ["is_installed", "users_frame"]

_PACKAGE = f"{__name__.partition('.')[0]}."


# Not by `sysconfig`, which reads a file: a process may have no descriptor left.
_STDLIB = f"{os.path.dirname(os.__file__)}/"


@cache
def is_installed(file: str) -> bool:
    """Return whether `file` is of an installed package or of Python itself."""
    return file.startswith((_STDLIB, "<frozen ")) or (
        "/site-packages/" in file or "/dist-packages/" in file
    )


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return `frame`, or the innermost of its callers that is the user's own."""
    while frame is not None and (
        # By the name of the module: the folders of the package differ when it is
        # mapped.
        frame.f_globals.get("__name__", "").startswith(_PACKAGE)
        or is_installed(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return frame
