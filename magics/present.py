"""Presenter: the outputs of a cell, from the I/O thread onto the screen.

Outputs come in on an I/O thread and are shown by the thread that calls
`pump`: in a notebook only what the main thread shows is sure to land in the
cell that is running.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable
from typing import Protocol

from rankscope.engines import Execution, Output, RankError

from .assemble import Assembler, Bundle, failure
from .failures import is_release
from .merge import Entry, Item, Merger

__all__ = ["Presenter", "Surface"]

#: Seconds after which an unfinished line is shown, and between two such shows.
PARTIAL_AFTER = 0.4
PARTIAL_EVERY = 0.2

#: How an item is shown: in full, as one line, not at all.
FULL, BRIEF, HIDDEN = "full", "brief", "hidden"

_INTERRUPTED = ("", "KeyboardInterrupt")

Shown = list[tuple[str, Item]]


class Surface(Protocol):
    """Where items go; `Screen` is one."""

    @property
    def can_redraw(self) -> bool: ...

    @property
    def shows_partials(self) -> bool: ...

    def show(self, items: Shown) -> None: ...

    def redraw(self, items: Shown) -> None: ...

    def update(self, bundle: Bundle) -> None: ...

    def partials(self, lines: dict[int, str]) -> None: ...


class Presenter:
    """Shows what the ranks of `execution` put out, shared output once."""

    def __init__(
        self,
        execution: Execution,
        surface: Surface,
        *,
        collapse: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.execution = execution
        #: Rank → its error, as far as they were shown.
        self.failures: dict[int, RankError] = {}
        #: Set while the ranks are being stopped: their last errors say only that.
        self.stopping = False
        #: Set when it was told already that ranks were let go, and why.
        self.releasing = False
        self._surface = surface
        self._clock = clock
        self._assembler = Assembler(execution.ranks, execution.cell)
        self._merger = Merger(execution.ranks, collapse=collapse)
        self._queue: queue.SimpleQueue[tuple[int, Output] | None] = queue.SimpleQueue()
        self._finished: set[int] = set()
        self._clears: set[int] = set()
        self._must_redraw = False
        self._shown: Shown = []
        self._partials_since: float | None = None
        self._partials_shown: dict[int, str] = {}
        execution.on_output(lambda rank, output: self._queue.put((rank, output)))
        execution.on_done(lambda done: self._queue.put(None))

    @property
    def done(self) -> bool:
        """Whether every rank is done and all it put out was taken in."""
        return len(self._finished) == len(self.execution.ranks)

    def pump(self, timeout: float) -> None:
        """Wait for output, at most `timeout` seconds; show what can be shown."""
        now = self._clock()
        due = self._merger.deadline
        wait = timeout if due is None else min(timeout, max(0.0, due - now))
        # Before the queue is read: all that these ranks put out is in it.
        running = set(self.execution.ranks_running)
        event = self._next(0.0 if not running else wait)
        now = self._clock()
        while event is not None:
            self._take(*event, now)
            event = self._next(0.0)
        for rank in sorted(set(self.execution.ranks) - running - self._finished):
            self._finish(rank, now)
        if self.done:
            # `close` shows what is left in its final form, at best without
            # having to take anything back.
            return
        self._show(self._merger.poll(now))
        self._show_partials(now)

    def close(self) -> None:
        """Show what is held back; bring the whole output into its final form."""
        items = self._merger.final()
        if items is None:
            self._show(self._merger.poll(math.inf))
            return
        # The cause first, then who was let go for it.
        final = sorted(self._moded(items), key=lambda pair: pair[0] == BRIEF)
        shown = len(self._shown)
        if final[:shown] == self._shown and not self._surface.shows_partials:
            self._surface.show(final[shown:])
        elif self._surface.can_redraw:
            self._surface.redraw(final)
        else:
            self._show(self._merger.poll(math.inf))

    # -- taking in ----------------------------------------------------------

    def _next(self, timeout: float) -> tuple[int, Output] | None:
        try:
            return (
                self._queue.get(timeout=timeout) if timeout else self._queue.get(False)
            )
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
            bundle = self._assembler.update(rank, output)
            if bundle is not None:
                self._surface.update(bundle)
            return
        self._feed(rank, self._assembler.feed(rank, output), now)

    def _feed(self, rank: int, entries: list[Entry], now: float) -> None:
        if entries and rank in self._clears:
            self._clear(rank)
        for entry in entries:
            if entry.kind == "error":
                self.failures[rank] = entry.content
            self._merger.feed(rank, entry, now)

    def _clear(self, rank: int) -> None:
        self._clears.discard(rank)
        if self._surface.can_redraw:
            self._merger.clear(rank)
            self._must_redraw = True

    def _finish(self, rank: int, now: float) -> None:
        self._finished.add(rank)
        self._feed(rank, self._assembler.flush(rank), now)
        error = self.execution.errors.get(rank)
        if error is not None and rank not in self.failures:
            # It published none itself: its engine is dead, or never began.
            self._feed(rank, [failure(error)], now)
        self._merger.finish(rank)

    # -- showing ------------------------------------------------------------

    def _show(self, items: list[Item]) -> None:
        if self._must_redraw:
            self._must_redraw = False
            everything = self._merger.restart()
            if everything is not None:
                self._shown = self._moded(everything)
                self._surface.redraw(self._shown)
                return
        if items:
            moded = self._moded(items)
            if self._merger.keeps:
                self._shown += moded
            self._surface.show(moded)

    def _moded(self, items: list[Item]) -> Shown:
        """The items that are shown at all, each with its mode."""
        moded = [(self._mode(item), item) for item in items]
        return [(mode, item) for mode, item in moded if mode != HIDDEN]

    def _mode(self, item: Item) -> str:
        if item.kind == "stderr" and self.stopping:
            # What IPython prints when it is interrupted in the middle of an error.
            return HIDDEN if item.content.strip() in _INTERRUPTED else FULL
        if item.kind != "error":
            return FULL
        released = is_release(item.content)
        if self.stopping and (released or item.content.ename == "KeyboardInterrupt"):
            return HIDDEN
        explained = any(not is_release(error) for error in self.failures.values())
        if not (released and explained):
            return FULL
        return HIDDEN if self.releasing else BRIEF

    def _show_partials(self, now: float) -> None:
        lines = self._assembler.partials()
        if not lines and not self._partials_shown:
            self._partials_since = None
            return
        if self._partials_since is None:
            self._partials_since = now + PARTIAL_AFTER
        if now >= self._partials_since and lines != self._partials_shown:
            self._partials_since = now + PARTIAL_EVERY
            self._partials_shown = lines
            self._surface.partials(lines)
