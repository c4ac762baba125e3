"""This rank among those of its job on this host, once it is known which one it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from .meeting import Meeting
from .part import STACKS
from .place import Place
from .reports import Reports
from .silent import SilentStacks, other_threads
from .waiting import Waiting

__all__ = ["HostRank"]


class HostRank:
    """Its place among the others, its stacks for them, and the reports of the job."""

    def __init__(
        self,
        rank: int,
        key: str,
        folder: Path,
        waiting: Waiting,
        place: Place,
        say: Callable[[str], None],
    ) -> None:
        self.rank, self.key = rank, key
        self.meeting = Meeting(key, rank)
        self.silent = SilentStacks(self.meeting.folder / f"{STACKS}{rank}.txt")
        try:
            self.meeting.tell({"signal": self.silent.signal})
        except OSError:
            self.leave()
            raise
        self.reports = Reports(folder, self.meeting, waiting, place, say)

    def tell_signal(self) -> None:
        """Tell the peers which threads there are to ask for stacks, if any."""
        if self.silent.signal is None:
            return
        if not self.silent.is_mine():
            self.silent.signal = None
            self.meeting.tell({"signal": None})
        else:
            self.meeting.tell({"threads": other_threads()})

    def leave(self, *, ends: bool = True) -> None:
        """Leave the ranks of this host; as a dead one, if its process `ends`."""
        leave = self.meeting.close if ends else self.meeting.leave_nothing
        for close in (self.silent.close, leave):
            with contextlib.suppress(OSError):
                close()
