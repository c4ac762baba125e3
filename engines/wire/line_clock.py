"""LineClock: the line at which a busy rank computes, and for how long already."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LineClock"]


class LineClock:
    """How long a rank has been seen at one line.

    Whether it was elsewhere between two looks is not known: a loop of one line has been
    there all the time, too.

    Parameters
    ----------
    locate
        Returns the innermost line of the user's code; empty where none runs.
    """

    def __init__(self, locate: Callable[[], str]) -> None:
        self._locate = locate
        # Replaced as a whole: requests are served beside the publisher.
        self._seen = "", 0.0

    def look(self) -> tuple[str, float | None]:
        """Return the line, and the seconds at it; ``None`` where none runs."""
        line, now = self._locate(), time.monotonic()
        seen, since = self._seen
        if line != seen:
            self._seen = seen, since = line, now
        return line, now - since if line else None
