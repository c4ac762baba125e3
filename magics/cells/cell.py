"""CellRun: the wait for one ``%%distributed`` cell, and its one-line error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

from rankscope.backends.observe.verdicts import in_one
from rankscope.backends.rank_sets import format_ranks, name_ranks
from rankscope.backends.thread_start import start_thread
from rankscope.engines import Cluster, Execution

from ..output.failures import CellError, CellTimeout, Interrupted, in_lines, tell
from ..output.render import Renderer
from ..output.stream import OutputStream
from .monitor import CellMonitor, Hang

__all__ = ["CellRun", "follow"]

#: Seconds between two checks of failures and deadlines while there is no output.
TICK = 0.1
#: Seconds for which a stop waits for the ranks: these, and those for each rank, as the
#: ranks of one machine stop one after the other.
STOP = 1.5
STOP_RANK = 0.3
#: Seconds between two interrupts: an `except` in the cell may have caught the first.
AGAIN = 0.5


def follow(stream: OutputStream, timeout: float | None = None) -> None:
    """Show output until all ranks are done, for at most `timeout` seconds."""
    until = None if timeout is None else time.monotonic() + timeout
    while not stream.done and (until is None or time.monotonic() < until):
        stream.pump(TICK)
    stream.close()


class CellRun:
    """Waits for a cell on the main thread and shows its output.

    All output is shown on this thread, so that it appears in the notebook cell that
    waits. The wait consists of short ones, so that Ctrl-C is handled at once; between
    two of them ``serve()`` does other work of the main thread. `hang` is that of
    `CellMonitor`. With `collapse` equal output of several ranks is shown once. The cell
    may take `limit` seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        execution: Execution,
        renderer: Renderer,
        *,
        serve: Callable[[], None],
        hang: Hang = lambda ranks: None,
        collapse: bool = True,
        limit: float | None = None,
    ) -> None:
        self._execution = execution
        self._serve = serve
        self._limit = limit
        self._began = time.monotonic()
        self._stream = OutputStream(execution, renderer, collapse=collapse)
        self._renderer = renderer
        self._monitor = CellMonitor(cluster, execution, renderer.notify, hang)

    def run(self) -> None:
        """Wait for the end and show output as it arrives."""
        try:
            self._follow()
        finally:
            self._stream.show_late()
        errors = self._execution.errors
        if errors:
            why = self._monitor.explain(errors)
            after = [self._monitor.restore(False)]
            if not self._renderer.is_rich:
                # No line opens there.
                after.append("%tb shows the traceback")
            said = tell(errors.values(), "; ".join(filter(None, after)), why)
            raise CellError(said, errors)

    def _follow(self) -> None:
        try:
            while not self._stream.done:
                self._wait(TICK)
                if self._limit is not None and self._elapsed > self._limit:
                    self._expire(self._limit)
        except KeyboardInterrupt:
            self._interrupted()
        self._close()

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _wait(self, timeout: float) -> None:
        """Wait for output, at most `timeout` seconds; check for failures."""
        self._stream.pump(timeout)
        self._serve()
        self._monitor.tick(self._stream.failures)
        self._stream.aborts_announced = bool(self._monitor.groups)
        self._renderer.hang(self._monitor.why_it_hangs(self._stream.failures))

    def _close(self) -> None:
        self._renderer.hang(None)
        self._stream.close()

    def _expire(self, limit: float) -> NoReturn:
        number = self._execution.cell
        cell = "the cell" if number is None else f"cell {number}"
        self._stop(f"{cell} passed its deadline of {limit:g} s")
        raise CellTimeout(self._end(f"not done after {limit:g} s")) from None

    def _interrupted(self) -> NoReturn:
        after = f"after {self._elapsed:.1f} s"
        self._stop("interrupted from the notebook")
        raise Interrupted(self._end(after)) from None

    def _stop(self, reason: str) -> None:
        self._stream.stopping = True
        acted, over = threading.Event(), threading.Event()

        def stop() -> None:
            try:
                self._monitor.stop(reason)
            finally:
                acted.set()
            while not over.wait(AGAIN):
                self._monitor.interrupt()

        # On a thread: a rank that does not answer must not block the notebook.
        start_thread("stop", stop)
        deadline = time.monotonic() + STOP + STOP_RANK * len(self._execution.ranks)
        try:
            # Where the cell ends by itself, `stop` must not act on the next one.
            while time.monotonic() < deadline:
                if self._stream.done and acted.wait(TICK):
                    break
                self._stream.pump(TICK)
        except KeyboardInterrupt:
            # A second interrupt ends the wait; what is known is said.
            pass
        finally:
            over.set()

    def _end(self, what: str) -> str:
        self._close()
        running = self._execution.ranks_running
        why, _ = in_one(self._monitor.verdicts)
        said, after = [what, self._monitor.places()], []
        if self._stream.left_out:
            said.append(f"{self._stream.left_out:,} lines of output left out")
        if running:
            said.append(f"{name_ranks(running)} did not stop yet")
            after.append(
                "%dist_rebuild once they have stopped (%dist_status); %dist_restart "
                f"{format_ranks(running)} replaces them, which loses their variables"
            )
        after.append(self._monitor.restore(True))
        return in_lines(
            "; ".join(filter(None, said)), why, "; ".join(filter(None, after))
        )
