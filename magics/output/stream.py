"""OutputStream: the outputs of a cell, from the I/O thread to the renderer.

Outputs arrive on an I/O thread; the thread that calls `pump` shows them: in a notebook
only output of the main thread is sure to appear in the running cell.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rankscope.backends.bounded_get import bounded_get
from rankscope.engines import Execution, Output, RankError

from .deduplicate import Entry, Item, OutputDeduplicator
from .parse import Bundle, OutputParser, failure

__all__ = ["OutputStream", "Surface"]

#: Seconds after which an unfinished line is shown, and between two updates of it.
PARTIAL_AFTER = 0.4
PARTIAL_EVERY = 0.2
#: Seconds for which output is taken in before it is shown.
TAKING = 0.1
#: Characters of output that are shown of ranks while they are stopped.
MOST_AT_STOP = 100_000
#: Seconds after which an unfinished line of a thread or child is shown as it is.
LATE_AFTER = 1.0

_INTERRUPTED = ("", "KeyboardInterrupt")

Shown = list[Item]


class Surface(Protocol):
    """The interface of `Renderer`; `late` is called on any thread, on one at a time."""

    @property
    def can_redraw(self) -> bool: ...

    @property
    def is_provisional(self) -> bool: ...

    def show(self, items: Shown) -> None: ...

    def redraw(self, items: Shown) -> None: ...

    def update(self, bundle: Bundle) -> None: ...

    def partials(self, lines: dict[int, str]) -> None: ...

    def late(self, rank: int, cell: int | None, entries: Sequence[Entry]) -> None: ...


class OutputStream:
    """Shows the outputs of the ranks of `execution`, shared output once."""

    def __init__(
        self,
        execution: Execution,
        surface: Surface,
        *,
        collapse: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.execution = execution
        #: Rank → its error, for the errors shown so far.
        self.failures: dict[int, RankError] = {}
        #: Set while the ranks are stopped: their last errors only report the stop.
        self.stopping = False
        #: Lines that were left out then: ranks may print without end.
        self.left_out = 0
        self._taken_at_stop = 0
        #: Set when a notice has named the aborted groups and the cause.
        self.aborts_announced = False
        self._surface = surface
        self._clock = clock
        self._parser = OutputParser(execution.ranks, execution.cell)
        self._deduplicator = OutputDeduplicator(execution.ranks, collapse=collapse)
        self._queue: queue.SimpleQueue[tuple[int, Output] | None] = queue.SimpleQueue()
        self._finished: set[int] = set()
        self._clears: set[int] = set()
        self._must_redraw = False
        self._shown: Shown = []
        self._partials_since: float | None = None
        self._partials_shown: dict[int, str] = {}
        self._late = threading.Lock()
        self._timers: dict[int, threading.Timer] = {}
        execution.on_output(lambda rank, output: self._queue.put((rank, output)))
        execution.on_done(lambda done: self._queue.put(None))

    @property
    def done(self) -> bool:
        """Whether every rank is done and all of its output is processed."""
        return len(self._finished) == len(self.execution.ranks)

    def pump(self, timeout: float) -> None:
        """Wait for output, at most `timeout` seconds; show what can be shown."""
        now = self._clock()
        due = self._deduplicator.deadline
        wait = timeout if due is None else min(timeout, max(0.0, due - now))
        # Read before the queue: it then has all output of the ranks that are done.
        running = set(self.execution.ranks_running)
        event = self._next(0.0 if not running else wait)
        now = self._clock()
        while event is not None:
            self._take(*event, now)
            # Ranks that print faster than this reads would keep all from being shown.
            if self._clock() > now + TAKING:
                break
            event = self._next(0.0)
        else:
            for rank in sorted(set(self.execution.ranks) - running - self._finished):
                self._finish(rank, now)
        if self.done:
            # `close` shows the rest in its final form, if possible without a redraw.
            return
        self._show(self._deduplicator.poll(now))
        self._show_partials(now)

    def close(self) -> None:
        """Show the entries held back; bring the whole output into its final form."""
        items = self._deduplicator.final()
        if items is None:
            self._show(self._deduplicator.poll(math.inf))
            return
        # The cause first, then the ranks whose op was aborted because of it.
        final = sorted(self._not_hidden(items), key=_by_cause)
        shown = len(self._shown)
        if final[:shown] == self._shown and not self._surface.is_provisional:
            self._surface.show(final[shown:])
        elif self._surface.can_redraw:
            self._surface.redraw(final)
        else:
            self._show(self._deduplicator.poll(math.inf))

    # -- after the end ----------------------------------------------------

    def show_late(self) -> None:
        """Show what threads and children print after the end, as it comes.

        To be called at the end; it is shown on the I/O thread.
        """
        self.execution.on_late_output(self._take_late)

    def _take_late(self, rank: int, output: Output) -> None:
        with self._late:
            if output["output_type"] == "update_display_data":
                self._update(rank, output)
                return
            self._show_late(rank, self._parser.feed(rank, output))
            # A child sends each piece of a line by itself.
            if rank in self._parser.partials() and rank not in self._timers:
                timer = threading.Timer(LATE_AFTER, self._flush_late, [rank])
                timer.daemon = True
                self._timers[rank] = timer
                timer.start()

    def _flush_late(self, rank: int) -> None:
        with self._late:
            del self._timers[rank]
            self._show_late(rank, self._parser.flush(rank))

    def _show_late(self, rank: int, entries: Sequence[Entry]) -> None:
        if entries:
            self._surface.late(rank, self.execution.cell, entries)

    # -- input ----------------------------------------------------------

    def _next(self, timeout: float) -> tuple[int, Output] | None:
        try:
            return bounded_get(self._queue, timeout)
        except queue.Empty:
            return None

    def _take(self, rank: int, output: Output, now: float) -> None:
        if output["output_type"] == "clear_output":
            if output.get("wait"):
                self._clears.add(rank)
            else:
                self._clear(rank)
            return
        if output["output_type"] == "update_display_data":
            self._update(rank, output)
            return
        if self.stopping and output["output_type"] == "stream":
            self._taken_at_stop += len(output["text"])
            if self._taken_at_stop > MOST_AT_STOP:
                self.left_out += output["text"].count("\n")
                return
        self._feed(rank, self._parser.feed(rank, output), now)

    def _update(self, rank: int, output: Output) -> None:
        bundle = self._parser.update(rank, output)
        if bundle is not None:
            self._surface.update(bundle)

    def _feed(self, rank: int, entries: list[Entry], now: float) -> None:
        if entries and rank in self._clears:
            self._clear(rank)
        for entry in entries:
            if entry.kind == "error":
                self.failures[rank] = entry.content
            self._deduplicator.feed(rank, entry, now)

    def _clear(self, rank: int) -> None:
        self._clears.discard(rank)
        if self._surface.can_redraw:
            self._deduplicator.clear(rank)
            self._must_redraw = True

    def _finish(self, rank: int, now: float) -> None:
        self._finished.add(rank)
        self._feed(rank, self._parser.flush(rank), now)
        error = self.execution.errors.get(rank)
        if error is not None and rank not in self.failures:
            # The rank has published none: its engine is dead, or the cell never began.
            self._feed(rank, [failure(error)], now)
        self._deduplicator.finish(rank)

    # -- output ------------------------------------------------------------

    def _show(self, items: list[Item]) -> None:
        if self._must_redraw:
            self._must_redraw = False
            everything = self._deduplicator.restart()
            if everything is not None:
                self._shown = self._not_hidden(everything)
                self._surface.redraw(self._shown)
                return
        if items:
            shown = self._not_hidden(items)
            if self._deduplicator.keeps:
                self._shown += shown
            self._surface.show(shown)

    def _not_hidden(self, items: list[Item]) -> Shown:
        return [item for item in items if not self._is_hidden(item)]

    def _is_hidden(self, item: Item) -> bool:
        if item.kind == "stderr" and self.stopping:
            # IPython prints this when an interrupt arrives during a traceback.
            return item.content.strip() in _INTERRUPTED
        if item.kind != "error":
            return False
        echo = item.content.is_abort_echo
        if self.stopping and (echo or item.content.ename == "KeyboardInterrupt"):
            return True
        explained = any(not error.is_abort_echo for error in self.failures.values())
        return echo and explained and self.aborts_announced

    def _show_partials(self, now: float) -> None:
        lines = self._parser.partials()
        if not lines and not self._partials_shown:
            self._partials_since = None
            return
        if self._partials_since is None:
            self._partials_since = now + PARTIAL_AFTER
        if now >= self._partials_since and lines != self._partials_shown:
            self._partials_since = now + PARTIAL_EVERY
            self._partials_shown = lines
            self._surface.partials(lines)


def _by_cause(item: Item) -> int:
    """Return a key that is greater for errors, and most for those of aborted ops."""
    return (1 + item.content.is_abort_echo) if item.kind == "error" else 0
