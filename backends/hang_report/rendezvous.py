"""Whether this rank waits for others to make a group of torch, by its own stack.

Until a group is made there is no op, and torch's recorder has nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

from ..work.user_code import users_frame

__all__ = ["rendezvous"]

_FILE = os.path.join("torch", "distributed", "distributed_c10d.py")
_MAKERS = ("init_process_group", "new_group", "split_group")


def rendezvous(env: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return in which call the main thread makes a group, and where its ranks meet."""
    ident = threading.main_thread().ident
    inner = None if ident is None else sys._current_frames().get(ident)
    frame = inner
    while frame is not None and not _makes_group(frame):
        frame = frame.f_back
    if frame is None:
        return None
    caller = users_frame(frame)
    address = f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}".strip(":")
    return {
        "call": frame.f_code.co_name,
        "address": address,
        "line": None
        if caller is None
        else [caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name],
    }


def _makes_group(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name in _MAKERS and code.co_filename.endswith(_FILE)
