"""How fast collectives are once all ranks are in, against what they were before.

It is the shortest time that a rank was in the op, by its own clock, as a rule that of
the last one to enter: whoever came late, and whatever the clocks of hosts, do not
matter. A rank that alone leaves late, as behind a slow link one way, is not in it:
`Pattern.LEAVES_LATE` names that one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from ..work.op_type import busbw

__all__ = ["Speed", "Speeds"]

#: Ops in a row that are compared, and those of a size class that are kept.
ROW = 20
#: Size classes, powers of two, of a group that are kept, and those that are told.
CLASSES, TOLD = 32, 3


@dataclass(frozen=True)
class Speed:
    """The last ops of one kind and size class, and the fastest ones in a row."""

    op: str
    #: As nccl-tests counts them, of the op in the middle.
    nbytes: int
    #: Seconds once all ranks are in: of the last `ROW` ops, and of as many at best.
    takes: float
    best: float
    #: GB/s of both.
    busbw: float
    best_busbw: float


@dataclass
class _Class:
    last: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=ROW))
    count: int = 0
    #: Ns in all.
    spent: int = 0
    #: Ns of the op in the middle of the fastest `ROW` ones.
    best: int = 0

    def add(self, nbytes: int, ns: int) -> None:
        self.last.append((nbytes, ns))
        self.count += 1
        self.spent += ns
        if self.count % ROW == 0:
            self.best = min(self.best or self.takes, self.takes)

    @property
    def takes(self) -> int:
        return int(median(ns for _, ns in self.last))


class Speeds:
    """Those of a group, with bounded state."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, int], _Class] = {}

    def add(self, op: str, nbytes: int, ns: int) -> None:
        """Take an op that moves bytes, and took `ns` once all ranks were in."""
        kind = op, nbytes.bit_length()
        found = self._classes.pop(kind, None) or _Class()
        found.add(nbytes, ns)
        self._classes[kind] = found
        while len(self._classes) > CLASSES:
            del self._classes[next(iter(self._classes))]

    def told(self, ranks: int) -> tuple[Speed, ...]:
        """Return those of a group of so many ranks that took most of the time."""
        known = [(op, one) for (op, _), one in self._classes.items() if one.best]
        known.sort(key=lambda found: -found[1].spent)
        return tuple(_speed(op, one, ranks) for op, one in known[:TOLD])


def _speed(op: str, one: _Class, ranks: int) -> Speed:
    nbytes = int(median(size for size, _ in one.last))
    takes, best = one.takes / 1e9, min(one.best, one.takes) / 1e9
    return Speed(
        op,
        nbytes,
        takes,
        best,
        busbw(op, nbytes, takes, ranks),
        busbw(op, nbytes, best, ranks),
    )
