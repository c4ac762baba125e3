"""How long the ops of a group take, as far as the board has seen them complete."""

from __future__ import annotations

from collections import deque
from statistics import median

from rankscope.engines import OpStatus

__all__ = ["Durations"]

#: Completed ops of one kind that count, the last ones.
_LAST = 64

#: Ops that take about equally long: the name, and the bytes that it moves.
_Kind = tuple[str, int | None]


class Durations:
    """The durations of completed ops, and the median for one that is in flight."""

    def __init__(self) -> None:
        self._seen: dict[int, OpStatus] = {}
        self._known: dict[_Kind, deque[float]] = {}
        self._medians: dict[_Kind, float] = {}

    def add(self, rank: int, completed: OpStatus | None) -> None:
        """Take in the op that `rank` reports as its last one completed."""
        if completed is None or completed == self._seen.get(rank):
            return
        self._seen[rank] = completed
        # Below 0: the clock was set back.
        if completed.duration is not None and completed.duration >= 0:
            kind = completed.op, completed.nbytes
            self._known.setdefault(kind, deque(maxlen=_LAST)).append(completed.duration)
            self._medians.pop(kind, None)

    def median(self, op: OpStatus) -> float | None:
        """Return the median of the ops of this name and size; None: none is known."""
        kind = op.op, op.nbytes
        if kind in self._known and kind not in self._medians:
            self._medians[kind] = median(self._known[kind])
        return self._medians.get(kind)
