"""Whether this rank waits for others to make a group, by its own stack.

Until a group is made there is no op, and no recorder has anything.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

from ..groups.api import init_process_group
from ..work.user_code import users_frame

__all__ = ["rendezvous"]

_TORCH = os.path.join("torch", "distributed", "distributed_c10d.py")
_MAKERS = ("init_process_group", "new_group", "split_group")


def rendezvous(address: str = "") -> dict[str, Any] | None:
    """Return in which call the main thread makes a group.

    `address` is where the ranks of the job meet.
    """
    ident = threading.main_thread().ident
    inner = None if ident is None else sys._current_frames().get(ident)
    frame = inner
    while frame is not None and not _makes_group(frame):
        frame = frame.f_back
    if frame is None:
        return None
    caller = users_frame(frame)
    return {
        "call": frame.f_code.co_name,
        "address": address,
        "line": None
        if caller is None
        else [caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name],
    }


def _makes_group(frame: FrameType) -> bool:
    code = frame.f_code
    if code is init_process_group.__code__:
        return True
    return code.co_name in _MAKERS and code.co_filename.endswith(_TORCH)
