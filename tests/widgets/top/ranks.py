"""Ranks that are not there, for the board in a terminal: what it asks of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rankscope.backends.observe.stacks import MAIN, Frame, Stack
from rankscope.backends.observe.verdicts import Verdict
from rankscope.engines import ClusterError, ClusterStatus, FlightRecords, RankStacks
from rankscope.engines.observe.profiling import Sampling
from rankscope.engines.status import Summary

__all__ = ["Ranks"]


class Ranks:
    """A cluster with the status and the verdicts that the test gives it."""

    detached = False
    ended: str | None = None

    def __init__(self, status: ClusterStatus, verdicts: Sequence[Verdict] = ()) -> None:
        self.status, self.verdicts = status, list(verdicts)
        self.calls: list[tuple[Any, ...]] = []
        self.closed = False
        self.fails = ""
        self._callbacks: list[Callable[[int, Summary], None]] = []

    @property
    def n(self) -> int:
        return self.status.world_size

    def take(self, status: ClusterStatus) -> None:
        """Have other statuses from now on, and tell who has subscribed."""
        self.status = status
        for callback in list(self._callbacks):
            for one in status.ranks:
                callback(one.rank, one)

    # -- what the feed asks for -----------------------------------------------

    def follow(self, interval: float) -> None:
        self.calls.append(("follow",))

    def glance(self, ranks: Iterable[int] | None = None) -> ClusterStatus:
        wanted = None if ranks is None else set(ranks)
        some = tuple(
            one for one in self.status.ranks if wanted is None or one.rank in wanted
        )
        return replace(self.status, ranks=some)

    def subscribe(self, callback: Callable[[int, Summary], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def flight_records(
        self, ranks: Iterable[int], *, last: int | None = None, timeout: float = 5.0
    ) -> FlightRecords:
        return FlightRecords({}, dict.fromkeys(ranks, 0))

    def start_sampling(self, ranks: Iterable[int], *, seconds: float) -> Sampling:
        raise ClusterError("these ranks have no process")

    # -- what the keys ask for ------------------------------------------------

    def diagnose(self) -> list[Verdict]:
        self.calls.append(("diagnose",))
        return self.verdicts

    def stacks(self, ranks: Iterable[int] | None = None) -> RankStacks:
        chosen = sorted(range(self.n) if ranks is None else ranks)
        self.calls.append(("stacks", tuple(chosen)))
        frame = Frame("Cell In[7]", 5, "<module>", "dist.all_reduce(x[0])", False)
        return RankStacks({rank: [Stack(MAIN, (frame,))] for rank in chosen})

    def abort(self, groups: Any, reason: str, ranks: Any, **more: Any) -> None:
        self.calls.append(("abort", [one.name for one in groups], reason, more["by"]))
        if self.fails:
            raise ClusterError(self.fails)

    def rebuild(self, groups: Any) -> list[str]:
        self.calls.append(("rebuild", [one.name for one in groups]))
        return []

    def close(self) -> None:
        self.closed = True
        self.closed_at = time.monotonic()
