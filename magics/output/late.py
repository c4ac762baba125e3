"""LateOutput: what threads and children print after the end of their cell."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from rankscope.engines import Execution, Output

from .deduplicate import Entry
from .parse import Bundle, OutputParser

__all__ = ["LateOutput", "LateSurface"]

#: Seconds after which an unfinished line is shown as it is.
PARTIAL_AFTER = 1.0


class LateSurface(Protocol):
    """Where late output is shown; called on any thread, on one at a time."""

    def update(self, bundle: Bundle) -> None: ...

    def late(self, rank: int, cell: int | None, entries: Sequence[Entry]) -> None: ...


class LateOutput:
    """Shows late output of `execution` as it comes, on the I/O thread."""

    def __init__(
        self, execution: Execution, parser: OutputParser, surface: LateSurface
    ) -> None:
        self._cell = execution.cell
        self._parser = parser
        self._surface = surface
        self._lock = threading.Lock()
        self._timers: dict[int, threading.Timer] = {}
        execution.on_late_output(self._take)

    def _take(self, rank: int, output: Output) -> None:
        with self._lock:
            if output["output_type"] == "update_display_data":
                bundle = self._parser.update(rank, output)
                if bundle is not None:
                    self._surface.update(bundle)
                return
            self._show(rank, self._parser.feed(rank, output))
            # A child sends each piece of a line by itself.
            if rank in self._parser.partials() and rank not in self._timers:
                timer = threading.Timer(PARTIAL_AFTER, self._flush, [rank])
                timer.daemon = True
                self._timers[rank] = timer
                timer.start()

    def _flush(self, rank: int) -> None:
        with self._lock:
            del self._timers[rank]
            self._show(rank, self._parser.flush(rank))

    def _show(self, rank: int, entries: Sequence[Entry]) -> None:
        if entries:
            self._surface.late(rank, self._cell, entries)
