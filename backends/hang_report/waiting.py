"""Since when this rank waits for others, in an op or while a group is made.

Until a group is made there is no op, and no recorder has anything: the stack tells.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from ..groups.world import world
from ..work.user_code import users_frame

__all__ = ["Waiting", "makes_group", "rendezvous"]

_OWN = os.path.join("backends", "groups", "api.py")
_TORCH = os.path.join("torch", "distributed", "distributed_c10d.py")
_MAKERS = ("init_process_group", "new_group", "split_group")


class Waiting:
    """Looks at the groups of this rank, and at its stack while it has none."""

    def __init__(self) -> None:
        #: What `since` returned last.
        self.seen: float | None = None
        #: The op, ``all_reduce #3 (train.py:7)``; empty: there was none.
        self.oldest = ""
        self._making_since: float | None = None

    def since(self) -> float | None:
        """Return since when this rank waits, ``time.time``; None: it does not."""
        now = time.time()
        begun = [
            (now - one.oldest.elapsed, str(one.oldest))
            for one in world.summary()
            if one.state == "ready" and one.oldest is not None and one.oldest.elapsed
        ]
        if not begun and rendezvous() is None:
            self._making_since = None
        elif not begun and self._making_since is None:
            self._making_since = now
        self.seen, self.oldest = min(begun, default=(self._making_since, ""))
        return self.seen


def rendezvous(address: str = "") -> dict[str, Any] | None:
    """Return in which call the main thread makes a group.

    `address` is where the ranks of the job meet.
    """
    ident = threading.main_thread().ident
    frame = None if ident is None else sys._current_frames().get(ident)
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
