"""Whether this rank waits for others to make a group, by its own stack.

Until a group is made there is no op, and no recorder has anything.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from ..work.user_code import users_frame

__all__ = ["makes_group", "rendezvous"]

_OWN = os.path.join("backends", "groups", "api.py")
_TORCH = os.path.join("torch", "distributed", "distributed_c10d.py")
_MAKERS = ("init_process_group", "new_group", "split_group")


def rendezvous(address: str = "") -> dict[str, Any] | None:
    """Return in which call the main thread makes a group.

    `address` is where the ranks of the job meet.
    """
    ident = threading.main_thread().ident
    inner = None if ident is None else sys._current_frames().get(ident)
    frame = inner
    while frame is not None and not makes_group(
        frame.f_code.co_filename, frame.f_code.co_name
    ):
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


def makes_group(file: str, function: str) -> bool:
    """Return whether a function of a file makes a group."""
    return function in _MAKERS and file.endswith((_OWN, _TORCH))
