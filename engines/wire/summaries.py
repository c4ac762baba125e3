"""The summaries of this process: what a rank reports about itself."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from rankscope.backends.groups.world import world

from ..status import Summary, encode
from .requests import EncodedSummary

__all__ = ["CpuClock", "LineClock", "SummaryWriter"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Seconds over which processor time is measured at least.
PERIOD = 1.0


class SummaryWriter:
    """Writes the summaries of an engine, or of a script's rank."""

    def __init__(
        self, locate: Callable[[], str], details: Callable[[], dict[str, Any]]
    ) -> None:
        self._line, self._cpu = LineClock(locate), CpuClock()
        self._details = details
        self._numbers = itertools.count(1)

    def write(self) -> EncodedSummary:
        # First: the summary has all that happened before it had its number.
        number, details = next(self._numbers), self._details()
        groups = world.summary()
        issued = tuple(
            (one.issued, one.enqueued and one.enqueued.seq) for one in groups
        )
        line, line_for = self._line.look(issued)
        return encode(
            Summary(
                number,
                pid=os.getpid(),
                line=line,
                line_for=line_for,
                memory=_resident_bytes(),
                cpu=self._cpu.look(),
                groups=groups,
                advice=world.advice(),
                **details,
            )
        )


class LineClock:
    """How long a rank has been seen at one line, and has issued no op.

    Whether it was elsewhere between two looks is not known else: a loop without ops has
    been at one line all the time, too.
    """

    def __init__(self, locate: Callable[[], str]) -> None:
        self._locate = locate
        # Replaced as a whole: requests are served beside the publisher.
        self._seen: tuple[tuple[str, object], float] = ("", None), 0.0

    def look(self, issued: object = None) -> tuple[str, float | None]:
        """Return the line, and the seconds at it; ``None`` where none runs.

        `issued` is another value once ops were issued since the last look.
        """
        line, now = self._locate(), time.monotonic()
        seen, since = self._seen
        if (line, issued) != seen:
            self._seen = (line, issued), now
            since = now
        return line, now - since if line else None


class CpuClock:
    """How many cores all threads of this process have kept busy, by the second."""

    def __init__(
        self,
        times: Callable[[], tuple[float, float]] = lambda: (
            time.monotonic(),
            time.process_time(),
        ),
    ) -> None:
        self._times = times
        # Replaced as a whole: requests are served beside the publisher.
        self._seen: tuple[float, float, float | None] = (*times(), None)

    def look(self) -> float | None:
        """Return the cores of the last second or longer, ``None`` within the first."""
        since, used, known = self._seen
        now, total = self._times()
        if now - since < PERIOD:
            return known
        cores = round((total - used) / (now - since), 2)
        self._seen = now, total, cores
        return cores


def _resident_bytes() -> int | None:
    try:
        # psutil opens three files for the same, at every publication of a status.
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return None
