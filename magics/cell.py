"""CellRun: one ``%%distributed`` cell, from its start to its one-line end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

from rankscope.engines import Cluster, Execution
from rankscope.widgets import format_ranks, name_ranks

from .failures import CellError, CellTimeout, Interrupted, summary_of
from .present import Presenter
from .screen import Screen
from .supervise import Supervisor

__all__ = ["CellRun", "follow"]

#: Seconds between two looks at failures and deadlines while nothing comes in.
TICK = 0.1
#: Seconds that ranks get to end after they were told to, and after which they
#: are told again: an `except` of theirs may have taken the first interrupt.
STOP = 1.5
AGAIN = 0.5


def follow(presenter: Presenter, timeout: float | None = None) -> None:
    """Show what comes until all ranks are done, at most `timeout` seconds."""
    until = None if timeout is None else time.monotonic() + timeout
    while not presenter.done and (until is None or time.monotonic() < until):
        presenter.pump(TICK)
    presenter.close()


class CellRun:
    """Runs the wait for a cell on the main thread.

    Everything is shown from here, so that it lands in the notebook cell that
    waits, and the wait is made of short ones, so that Ctrl-C gets through.
    `limit` is the number of seconds the cell may take. ``serve()`` is called
    now and then: what else the main thread has to do while it waits.
    """

    def __init__(
        self,
        cluster: Cluster,
        execution: Execution,
        screen: Screen,
        *,
        serve: Callable[[], None],
        collapse: bool = True,
        limit: float | None = None,
    ) -> None:
        self._execution = execution
        self._serve = serve
        self._limit = limit
        self._began = time.monotonic()
        self._presenter = Presenter(execution, screen, collapse=collapse)
        self._supervisor = Supervisor(cluster, execution, screen.say)

    def run(self) -> None:
        """Wait for the end, showing output as it comes.

        Raises `CellError` if ranks failed, `CellTimeout` after `limit`
        seconds, `Interrupted` on Ctrl-C.
        """
        try:
            while not self._presenter.done:
                self._wait(TICK)
                if self._limit is not None and self._elapsed > self._limit:
                    self._expire(self._limit)
        except KeyboardInterrupt:
            self._interrupted()
        self._presenter.close()
        errors = self._execution.errors
        if errors:
            told = [summary_of(errors.values()), self._supervisor.restore(False)]
            raise CellError("; ".join(filter(None, told)), errors)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _wait(self, timeout: float) -> None:
        """Wait a little."""
        self._presenter.pump(timeout)
        self._serve()
        self._supervisor.tick(self._presenter.failures)
        self._presenter.releasing = bool(self._supervisor.groups)

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
        self._presenter.stopping = True
        over = threading.Event()

        def stop() -> None:
            self._supervisor.stop(reason)
            while not over.wait(AGAIN):
                self._supervisor.interrupt()

        # On a thread: a rank that does not answer must not keep the person.
        threading.Thread(target=stop, name="rankscope-stop", daemon=True).start()
        deadline = time.monotonic() + STOP
        while not self._presenter.done and time.monotonic() < deadline:
            self._presenter.pump(TICK)
        over.set()

    def _end(self, what: str) -> str:
        self._presenter.close()
        running = self._execution.ranks_running
        told = [what, self._supervisor.places()]
        if running:
            told.append(
                f"{name_ranks(running)} did not stop: "
                f"%dist_restart {format_ranks(running)} replaces them"
            )
        told.append(self._supervisor.restore(True))
        return "; ".join(filter(None, told))
