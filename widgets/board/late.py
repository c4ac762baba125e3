"""Who keeps the others waiting, on the board: asked for now and then, on a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rankscope.backends.observe.late_findings import LateFinding
from rankscope.backends.observe.lateness import GroupLateness, Lateness
from rankscope.backends.thread_start import start_thread
from rankscope.engines import ClusterError
from rankscope.engines.observe.lateness import Recorded, located, take
from rankscope.engines.observe.profiling import Profile, Sampling

from ..units import duration_text
from .rows import Cells

__all__ = ["LateWatch", "late_cells"]

_log = logging.getLogger(__name__)

#: Seconds between two looks at least; a look takes a fortieth of a core at most.
PERIOD = 2.0
REST_FACTOR = 39.0
#: Records of a rank that a look asks for: what is judged is kept from look to look.
LAST = 40
#: Ops from which on a rank's cells are shown.
ENOUGH = 5
#: Seconds for which late ranks are sampled between two looks, at most.
SAMPLED = 5.0


def late_cells(group: GroupLateness) -> dict[int, Cells]:
    """Return rank → its cells ``late`` and ``waits``; ``awaited``: that is certain."""
    awaited = {rank for one in group.findings for rank in one.ranks}
    found: dict[int, Cells] = {}
    for rank, one in group.ranks.items():
        if one.of < ENOUGH:
            continue
        row = found[rank] = {"waits": f"{one.waits:.0%}"}
        if one.late:
            row["late"] = f"{one.late / one.of:.0%} · {duration_text(one.by)}"
        if rank in awaited:
            row["awaited"] = 1
    return found


class LateWatch:
    """Asks the ranks for their last records while they make progress.

    ``show(groups)`` is called on its thread, with the findings that two looks in a row
    have, and with where the late ranks are meanwhile where that is known: their stacks
    are sampled from one look to the next.
    """

    def __init__(
        self, cluster: Recorded, show: Callable[[Sequence[GroupLateness]], None]
    ) -> None:
        self._cluster = cluster
        self._show = show
        self._lateness = Lateness()
        # The findings of the last look.
        self._before: set[tuple[Any, ...]] = set()
        self._sampling: Sampling | None = None
        self._thread: threading.Thread | None = None
        self._issued = 0
        self._next = 0.0

    def look(self, issued: Callable[[], int], now: float) -> None:
        """Look if it is time, and the number of ops is another one; do not wait."""
        looks = self._thread is not None and self._thread.is_alive()
        if looks or now < self._next:
            return
        number, self._next = issued(), now + PERIOD
        if number == self._issued:
            return
        self._issued = number
        self._thread = start_thread("board-late", self._look)

    def join(self) -> None:
        """Wait for a look that is being made."""
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        began = time.thread_time()
        try:
            sampling, self._sampling = self._sampling, None
            profile = Profile({}) if sampling is None else sampling.take()
            take(self._cluster, self._lateness, last=LAST)
        except (ClusterError, OSError):
            # The cluster was shut down: what was found stands.
            return
        except Exception:  # noqa: BLE001
            # Records of a rank that are not as expected: the board goes on.
            _log.exception("the board could not tell which ranks are late")
            return
        groups = self._lateness.groups()
        found = [one for group in groups for one in group.findings]
        keys = {one.key for one in found}
        confirmed, self._before = keys & self._before, keys
        shown = [
            replace(
                group,
                findings=tuple(
                    located(
                        [one for one in group.findings if one.key in confirmed], profile
                    )
                ),
            )
            for group in groups
        ]
        self._show(shown)
        # Those of one look, too: the next one tells with them where they are.
        self._sample(found)
        cost = time.thread_time() - began
        self._next = max(self._next, time.monotonic() + REST_FACTOR * cost)

    def _sample(self, findings: Sequence[LateFinding]) -> None:
        """Sample the late ranks until the next look: where are they meanwhile?"""
        ranks = sorted({rank for one in findings for rank in one.windows})
        if ranks:
            try:
                self._sampling = self._cluster.start_sampling(ranks, seconds=SAMPLED)
            except (ClusterError, OSError):
                # They do not answer: where they are stays unknown.
                return
