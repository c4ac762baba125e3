"""Running cells: requests to the engines' main threads, and their ends."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import ipyparallel

from . import private
from .execution import Execution, RankError
from .roster import Roster
from .seats import Seat

__all__ = ["CellRunner"]


class CellRunner:
    """Sends cells to the ranks of a roster and sees to it that each one ends."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._running: set[Execution] = set()
        self._lock = threading.Lock()

    def run(self, execution: Execution) -> None:
        """Send a cell to its ranks."""
        with self._lock:
            self._running.add(execution)
        execution.on_done(self._forget)
        request = {
            "code": execution.code,
            "silent": False,
            # The numbers are the notebook's: IPython would complain about
            # two cells with the same one.
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        asked = {"cell": execution.cell, "group": execution.group}
        for rank in execution.ranks:
            self._send(execution, self._roster.seats[rank], request, asked)

    def _send(
        self,
        execution: Execution,
        seat: Seat,
        request: Mapping[str, Any],
        asked: Mapping[str, Any],
    ) -> None:
        if seat.alive:
            future: Any = private.send(
                self._roster.client,
                "shell",
                "execute_request",
                request,
                seat.uuid,
                metadata={"rankscope": asked},
                on_iopub=lambda message: execution.receive(seat.rank, message),
            )
            future.add_done_callback(lambda done: _replied(execution, seat.rank, done))
        if not seat.alive:
            # Also if it died while the request was on its way.
            execution.finish(seat.rank, _engine_died(seat))

    def _forget(self, execution: Execution) -> None:
        with self._lock:
            self._running.discard(execution)

    def running(self) -> list[Execution]:
        """The cells that are not done."""
        with self._lock:
            return list(self._running)

    def engine_died(self, seat: Seat) -> None:
        """End the cells that ran on an engine that is gone."""
        for execution in self.running():
            if seat.rank in execution.ranks:
                execution.finish(seat.rank, _engine_died(seat))

    def abandon(self, ename: str, evalue: str) -> None:
        """End every cell on every rank: nobody will hear of them any more."""
        for execution in self.running():
            for rank in execution.ranks_running:
                execution.finish(rank, RankError(rank, ename, evalue))


def _replied(execution: Execution, rank: int, done: Future[Any]) -> None:
    """A rank replied: it is done when its last output is there too."""
    reply = done.result()
    future: Any = done
    if getattr(reply, "ename", "") == "EngineError":
        # Its death is told by the roster, which knows more about it.
        private.finish_output(future)
        return
    error = None
    if isinstance(reply, ipyparallel.error.RemoteError):
        trace = tuple((reply.traceback or "").splitlines())
        error = RankError(rank, reply.ename, reply.evalue, trace, execution.cell)
    elif isinstance(reply, Exception):
        error = RankError(rank, type(reply).__name__, str(reply), (), execution.cell)
    future.output.add_done_callback(lambda output: execution.finish(rank, error))


def _engine_died(seat: Seat) -> RankError:
    return RankError(seat.rank, "EngineDied", str(seat.death))
