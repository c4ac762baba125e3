"""Since when this rank waits for others, in an op or while a group is made."""

from __future__ import annotations

import time

from ..groups.world import world
from .rendezvous import rendezvous

__all__ = ["Waiting"]


class Waiting:
    """Looks at the groups of this rank, and at its stack while it has none."""

    def __init__(self) -> None:
        #: What `since` returned last.
        self.seen: float | None = None
        self._making_since: float | None = None

    def since(self) -> float | None:
        """Return since when this rank waits, ``time.time``; None: it does not."""
        now = time.time()
        begun = [
            now - one.oldest.elapsed
            for one in world.summary()
            if one.state == "ready" and one.oldest is not None and one.oldest.elapsed
        ]
        if not begun and rendezvous() is None:
            self._making_since = None
        elif not begun and self._making_since is None:
            self._making_since = now
        self.seen = min(begun, default=self._making_since)
        return self.seen
