"""The report that the ranks of a cluster write of an op that waits for minutes.

Somebody who looks has read the verdict on the board long before, and has ended the
cell: then no report is written. Deaths and errors of ops end the cell with their reason
at once. What is left is the hang that nobody has ended: the notebook runs at night, or
its kernel is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rankscope.backends.hang_report.place import Place
from rankscope.backends.hang_report.reporter import Reporter
from rankscope.backends.hang_report.settings import Settings

from ..wire.ipykernel_private import say_in_cell

__all__ = ["HangReports"]


class HangReports:
    """Begins when this engine is a rank, and goes on whichever rank it becomes."""

    def __init__(
        self,
        kernel: Any,
        cluster: str,
        on_crash: Callable[[], None],
        exit_while_idle: Callable[[], str],
    ) -> None:
        self._on_crash = on_crash
        self._kernel = kernel
        self._place = Place()
        self._place.job = f"cluster {cluster}"
        self._place.exit_while_idle = exit_while_idle
        self._reporter: Reporter | None = None

    def assign(self, rank: int, world_size: int) -> None:
        """Note which rank this engine is."""
        settings = Settings.of()
        self._place.assign(rank, world_size)
        if self._reporter is None and settings.folder is not None and world_size > 1:
            say = partial(say_in_cell, self._kernel)
            self._reporter = Reporter(settings, self._place, say=say)
            self._reporter.on_crash = self._on_crash
            self._reporter.start()
