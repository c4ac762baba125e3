"""Running cells: requests to the engines' main threads, and their ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ipyparallel

from . import private
from .execution import Execution, RankError
from .roster import Roster
from .seats import Seat

__all__ = ["CellRunner"]

#: Seconds that a rank may say that it is idle while a cell is to run there.
LAG = 2.0
#: Seconds after which an unanswered question for lost cells is asked again.
PATIENCE = 10.0


@dataclass
class _Sent:
    """A cell on its way to a rank, or running there."""

    future: Any
    at: float


@dataclass
class _Probe:
    """A question that a rank answers when it is through with what came before."""

    future: Any
    at: float
    about: list[Execution]


class CellRunner:
    """Sends cells to the ranks of a roster and sees to it that each one ends."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._running: dict[Execution, dict[int, _Sent]] = {}
        self._probes: dict[int, _Probe] = {}
        self._lock = threading.Lock()
        roster.subscribe(self._look_for_lost)

    def run(self, execution: Execution) -> None:
        """Send a cell to its ranks."""
        with self._lock:
            self._running[execution] = {}
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
            with self._lock:
                sent = self._running.get(execution, {})
                sent[seat.rank] = _Sent(future, time.monotonic())
            future.add_done_callback(lambda done: _replied(execution, seat.rank, done))
        if not seat.alive:
            # Also if it died while the request was on its way.
            execution.finish(seat.rank, _engine_died(seat))

    def _forget(self, execution: Execution) -> None:
        with self._lock:
            self._running.pop(execution, None)

    def running(self) -> list[Execution]:
        """The cells that are not done."""
        with self._lock:
            return list(self._running)

    # -- lost connections --------------------------------------------------

    def _look_for_lost(self, rank: int, summary: Mapping[str, Any]) -> None:
        """A rank reports; on the I/O thread.

        What is sent while the connection to the controller is gone reaches
        nobody, and nobody sends it again. If a rank says that it is idle
        while a cell is to run there, it is asked something on the way that
        cells take, where nothing overtakes: what has not ended when the
        answer is there, with all that was published before it, never will.
        """
        if summary.get("busy") is not False or "dead" in summary:
            return
        now = time.monotonic()
        with self._lock:
            about = [
                execution
                for execution, sent in self._running.items()
                if rank in sent
                and now - sent[rank].at > LAG
                and rank in execution.ranks_running
            ]
            asked = self._probes.get(rank)
            if not about or (asked and now - asked.at < PATIENCE):
                return
            if asked is not None:
                private.forget(self._roster.client, asked.future.msg_id)
            uuid = self._roster.seats[rank].uuid
            future: Any = private.probe(self._roster.client, uuid)
            self._probes[rank] = _Probe(future, now, about)
        future.add_done_callback(
            lambda done: future.output.add_done_callback(
                lambda output: self._answered(rank, future)
            )
        )

    def _answered(self, rank: int, future: Any) -> None:
        """A rank is through with everything that was sent before a probe."""
        with self._lock:
            probe = self._probes.get(rank)
            if probe is None or probe.future is not future:
                return
            del self._probes[rank]
            lost = [
                (one, self._running[one][rank].future)
                for one in probe.about
                if one in self._running
            ]
        for execution, sent in lost:
            private.forget(self._roster.client, sent.msg_id)
            if sent.done() and isinstance(sent.result(), Exception):
                # How it ended is known, only its output is not.
                private.finish_output(sent)
            execution.finish(rank, _connection_lost(rank, ended=sent.done()))

    # -- deaths ------------------------------------------------------------

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


def _connection_lost(rank: int, *, ended: bool) -> RankError:
    if ended:
        what = f"the cell ended on rank {rank}, but some of its output was not heard"
    else:
        what = f"whether the cell ran to its end on rank {rank} was not heard"
    return RankError(
        rank,
        "ConnectionLost",
        f"the connection to the controller failed for a while: {what}. Look at the "
        "rank's variables before you run it again",
    )
