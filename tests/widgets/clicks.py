"""The answer to a question of the board."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.backends.conformance.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Locator


def click_yes(yes: Locator, timeout: float = 30) -> float:
    """Click a *yes* until it is taken; return when it was clicked last."""
    clicked = 0.0

    def answered() -> bool:
        # The second click of a double click is no answer, and is ignored.
        nonlocal clicked
        clicked = time.monotonic()
        if yes.is_visible():
            yes.click()
        return not yes.is_visible()

    until(answered, timeout)
    return clicked
