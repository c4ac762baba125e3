"""Waits for what other processes do with files."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(
    condition: Callable[[], bool], seconds: float, interval: float = 0.01
) -> bool:
    """Wait until `condition` holds, for `seconds` at most; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
