"""Asking all ranks why an op hangs: on demand, and when one has hung for long."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from rankscope.backends.diagnosis import RankView, SecondLook, Verdict, diagnose

from .errors import ClusterError
from .rings import Rings
from .status import ClusterStatus, RankStatus

__all__ = ["STALL", "StallWatch", "look", "look_twice"]

#: Seconds in flight after which an op counts as stalled.
STALL = 5.0
#: Seconds in flight that count where a person asks.
ASKED_STALL = 0.5
#: Seconds between two looks: what moves has moved by then.
BETWEEN = 0.4
#: Records of each rank that are looked at.
RECORDS = 200
#: Seconds between two glances of the watch at what is known anyway, and, once it
#: has told what it saw, between two looks.
PERIOD = 0.25
TOLD_PERIOD = 0.5

#: Seconds after which a rank that is asked and does not answer is not responding.
QUIET = 2.0

# A line of `Ranks.where`: where a cell's own code is.
_CELL_LINE = re.compile(r"^Cell In\[(\d+)\], line (\d+)", re.MULTILINE)


class Asked(Protocol):
    """What is asked of a cluster here."""

    def status(self, *, fresh: bool = ..., timeout: float = ...) -> ClusterStatus:
        """What is known by now, or asked afresh."""

    def glance(self) -> ClusterStatus:
        """What is known by now, asking nobody."""

    def rings(self, ranks: Iterable[int], *, last: int | None = ...) -> Rings:
        """The flight recorders of some ranks."""

    def where(self, ranks: Iterable[int]) -> dict[int, str]:
        """What the main threads are doing, as stacks."""


def look(cluster: Asked, stall: float) -> list[Verdict]:
    """Look once at all groups; see `backends.diagnosis.diagnose`."""
    status = cluster.status(fresh=True)
    # Who is silent is not waited for again.
    asked = [one.rank for one in status.ranks if one.alive and not _silent(one)]
    rings = cluster.rings(asked, last=RECORDS) if asked else Rings()
    places = cluster.where(asked) if asked else {}
    views = {
        one.rank: _view(one, rings, places.get(one.rank, "")) for one in status.ranks
    }
    verdicts = []
    for name, ranks, generation in _groups(status):
        verdicts += diagnose(name, ranks, generation, views, stall)
    return verdicts


def look_twice(cluster: Asked, stall: float = ASKED_STALL) -> list[Verdict]:
    """Look until two looks in a row agree, or there is nothing to agree on."""
    second, first = SecondLook(), look(cluster, stall)
    if not first:
        return []
    second.confirm(first)
    threading.Event().wait(BETWEEN)
    return second.confirm(look(cluster, stall))


def _view(one: RankStatus, rings: Rings, stack: str) -> RankView:
    ring = rings.rings.get(one.rank)
    cell_lines = _CELL_LINE.findall(stack)
    place = "cell {} line {}".format(*cell_lines[-1]) if cell_lines else ""
    if one.state == "busy" and not place and stack not in ("", "idle"):
        place = stack.splitlines()[0]
    return RankView(
        one.rank,
        records=ring["records"] if ring else (),
        now_ns=time.time_ns() + rings.offsets_ns.get(one.rank, 0),
        death=one.reason or "its engine is gone" if not one.alive else None,
        silent_for=one.heartbeat_age if one.alive and _silent(one) else None,
        place=place,
        left=str(one.summary.get("left", "")),
    )


def _silent(one: RankStatus) -> bool:
    """Whether a rank that was just asked has been silent for two beats of its heart."""
    return one.heartbeat_age is None or one.heartbeat_age > QUIET


def _groups(status: ClusterStatus) -> list[tuple[str, Sequence[int], int]]:
    """Every group there is: its name, ranks and latest generation."""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank in status.ranks:
        for group in rank.groups:
            if group.state == "ready":
                key = group.name, group.ranks
                found[key] = max(found.get(key, 0), group.generation)
    return [(name, ranks, generation) for (name, ranks), generation in found.items()]


class StallWatch:
    """A thread that looks for the reason once an op has been in flight for long.

    ``tell(verdicts)`` is called when they change, with ``[]`` when it is over.
    It costs a glance at what is known anyway; the ranks are asked only while
    an op is stalled, or a rank is dead or silent.
    """

    def __init__(
        self,
        cluster: Asked,
        tell: Callable[[list[Verdict]], Any],
        stall: float = STALL,
    ) -> None:
        self._cluster = cluster
        self._tell = tell
        self._stall = stall
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="rankscope-stall-watch", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        second, told = SecondLook(), list[Verdict]()
        while not self._stop.wait(TOLD_PERIOD if told else PERIOD):
            try:
                suspicious = self._suspicious(self._cluster.glance())
                found = look(self._cluster, self._stall) if suspicious else []
            except ClusterError:
                # It was shut down: the last verdict stands.
                return
            verdicts = second.confirm(found)
            if [one.key for one in verdicts] != [one.key for one in told]:
                told = verdicts
                self._tell(verdicts)

    def _suspicious(self, status: ClusterStatus) -> bool:
        for rank in status.ranks:
            if rank.state in ("dead", "unreachable"):
                return True
            for group in rank.groups:
                # As of the rank's last word: it grows while the rank waits.
                oldest = group.oldest
                age = (rank.heartbeat_age or 0.0) if oldest is not None else 0.0
                if oldest is not None and (oldest.elapsed or 0.0) + age > self._stall:
                    return True
        return False
