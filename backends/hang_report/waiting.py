"""Since when this rank waits for others, in an op or while a group is made.

Until a group is made there is no op, and no recorder has anything: the stack tells.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ..groups.world import world
from ..work.user_code import frame_of_thread, users_frame

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
        # By the monotonic clock: when it began to make a group.
        self._making_since: float | None = None

    def since(self) -> float | None:
        """Return since when this rank waits, ``time.time``; None: it does not."""
        now = time.monotonic()
        begun = [
            (now - one.oldest.elapsed, str(one.oldest))
            for one in world.summary()
            if one.state == "ready" and one.oldest and one.oldest.elapsed
        ]
        if not begun and rendezvous() is None:
            self._making_since = None
        elif not begun and self._making_since is None:
            self._making_since = now
        first, self.oldest = min(begun, default=(self._making_since, ""))
        self.seen = None if first is None else time.time() - (now - first)
        return self.seen


def rendezvous(
    address: str = "", error: BaseException | None = None
) -> dict[str, Any] | None:
    """Return in which call the main thread makes a group, or has failed by `error`.

    `address` is where the ranks of the job meet, unless the call tells of another one,
    and of another number of ranks.
    """
    if error is None:
        inner = frame_of_thread(threading.main_thread().ident)
        calls = traceback.walk_stack(inner) if inner is not None else iter(())
    else:
        calls = reversed([*traceback.walk_tb(error.__traceback__)])
    found: dict[str, Any] | None = None
    for frame, number in calls:
        code = frame.f_code
        if found is None and makes_group(code.co_filename, code.co_name):
            given = _given(frame.f_locals)
            found = {"call": code.co_name, "address": address, "line": None, **given}
        if found is not None and users_frame(frame) is frame:
            found["line"] = [code.co_filename, number, code.co_name]
            break
    return found


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what arguments of `init_process_group` tell of the meeting."""
    url, size = arguments.get("init_method"), arguments.get("world_size")
    at = urlsplit(url).netloc if isinstance(url, str) else ""
    given: dict[str, Any] = {"address": at} if at else {}
    if isinstance(size, int) and size > 0:
        given["world_size"] = size
    return given


def makes_group(file: str, function: str) -> bool:
    return function in _MAKERS and file.endswith((_OWN, _TORCH))
