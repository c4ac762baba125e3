"""Wait for a condition with a deadline, instead of sleeping for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["until"]

T = TypeVar("T")


def until(condition: Callable[[], T], timeout: float = 30, what: str = "") -> T:
    """Return the first true value of `condition`; fail when `timeout` s passed."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what or condition}")
        time.sleep(0.005)
