"""Torch's desync report in a log (``TORCH_NCCL_DESYNC_DEBUG=1``): how far all came.

The rank whose op timed out writes, below a line of its own, what each rank of the group
wrote last into the store: the number and name of the last op that it has enqueued, and
whether that one is over. Ranks and numbers are those of the group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from .log_lines import function_of

__all__ = ["TIMEOUT", "DesyncReport", "LastOp"]

#: What the first line of a report has.
TIMEOUT = "Timeout at collective: "

_RANKS = r"\[(?P<ranks>\d[\d, ]*)\]"
_NEVER = re.compile(rf"To our best knowledge, ranks {_RANKS} are the lagging ranks")
_NUMBER = re.compile(r"\s*#(?P<seq>\d{1,18}) (?:started|finished) ranks:")
_STATE = re.compile(rf"\s*{_RANKS} (?P<state>started|finished) (?P<op>\w+)\s*$")
_JOINED = re.compile(
    rf"{_RANKS} joined but didn't finish collective #(?P<seq>\d{{1,18}})"
)
_FINISHED = re.compile(rf"{_RANKS} finished collective #(?P<seq>\d{{1,18}})")
_OTHER = re.compile(r"\s+- (?:\[\d|To our best|Snapshot)")


class LastOp(NamedTuple):
    """The last op that a rank has enqueued; 0 for none."""

    seq: int
    is_over: bool
    #: Empty where the report does not name it.
    op: str = ""


@dataclass
class DesyncReport:
    """One report, line by line."""

    #: By the rank in the group.
    last: dict[int, LastOp] = field(default_factory=dict)
    #: The number that the next lines are about.
    _seq: int = 0

    def feed(self, text: str) -> bool:
        """Take a line; return whether it is one of the report."""
        if (found := _STATE.match(text)) is not None:
            over = found["state"] == "finished"
            self._take(
                found["ranks"], LastOp(self._seq, over, function_of(found["op"]))
            )
        elif (found := _NUMBER.match(text)) is not None:
            self._seq = int(found["seq"])
        elif (found := _JOINED.search(text)) is not None:
            self._take(found["ranks"], LastOp(int(found["seq"]), False))
        elif (found := _FINISHED.search(text)) is not None:
            self._take(found["ranks"], LastOp(int(found["seq"]), True))
        elif (found := _NEVER.search(text)) is not None:
            self._take(found["ranks"], LastOp(0, True))
        else:
            return TIMEOUT in text or _OTHER.match(text) is not None
        return True

    def _take(self, ranks: str, last: LastOp) -> None:
        for rank in ranks.split(","):
            if rank.strip().isdigit():
                self.last[int(rank)] = last

    @property
    def size(self) -> int | None:
        """The size of the group, if the report has all of its ranks."""
        size = len(self.last)
        return size if size > 1 and max(self.last) == size - 1 else None
