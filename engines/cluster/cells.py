"""Running cells: requests to the engines' main threads, and their replies."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ipyparallel

from rankscope.backends.rank_sets import tell_ranks

from ..errors import ClusterError, RankError
from ..observe.rank_slots import RankSlot
from ..status import Summary
from ..wire import ipyparallel_private as private
from ..wire import message_types, requests
from .execution import Execution
from .registry import EngineRegistry

__all__ = ["CellRunner"]

#: Requests of cells whose late output is heard: as many ranks of the last cells.
HEARD = 1024
#: Seconds that a rank may report idle after a cell was sent to it.
LAG = 2.0
#: Seconds after which an unanswered probe is sent again.
PATIENCE = 10.0
#: Seconds to wait for ranks that run another client's cell.
TURN = 5.0
#: Seconds that a rank gets to say whether it runs another client's cell.
ANSWER = 1.0


@dataclass
class _Sent:
    """A cell on its way to a rank, or running there."""

    future: Any
    at: float


@dataclass
class _Probe:
    """An empty request that a rank answers after everything that was sent before."""

    future: Any
    at: float
    about: list[Execution]


class CellRunner:
    """Sends cells to ranks, and ends each cell that can receive no reply any more."""

    def __init__(self, registry: EngineRegistry) -> None:
        self._registry = registry
        self._running: dict[Execution, dict[int, _Sent]] = {}
        self._probes: dict[int, _Probe] = {}
        self._lock = threading.Lock()
        # One cell at a time: all ranks get the cells of this client in one order.
        self._sending = threading.Lock()
        self._yielding = False
        # The requests of cells that have ended and may still have output.
        self._heard: deque[str] = deque()
        registry.subscribe(self._probe_for_lost_cells)
        registry.subscribe(self._share)

    def run(self, execution: Execution, groups: Mapping[int, str]) -> None:
        """Send a cell to its ranks; `groups`: rank → id, where it is not default."""
        with self._sending:
            if self._registry.owner is not None:
                self._send_all(execution, groups)
                return
        self._reserve(execution)
        with self._sending:
            self._send_all(execution, groups)

    def _send_all(self, execution: Execution, groups: Mapping[int, str]) -> None:
        with self._lock:
            self._running[execution] = {}
        execution.on_done(self._remove)
        request = {
            "code": execution.code,
            "silent": False,
            # The cell numbers are the notebook's: IPython would complain about two
            # cells with the same number.
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        dead = [slot.rank for slot in self._registry.slots if not slot.alive]
        for rank in execution.ranks:
            metadata = {
                "cell": execution.cell,
                "dead": dead,
                "group": groups.get(rank),
                "keep_value": execution.keep_value,
                "key": execution.key,
            }
            self._send(execution, self._registry.slots[rank], request, metadata)

    def _reserve(self, execution: Execution) -> None:
        """Reserve ranks that can answer: the others decide when the cell begins."""
        key = execution.key
        wanted = requests.Reserve(key, self._registry.this_client, execution.cell)
        deadline = time.monotonic() + TURN
        while True:
            able = set(self._registry.able()).intersection(execution.ranks)
            answers = self._registry.ask(wanted, able, timeout=ANSWER)
            held = {rank: one for rank, one in answers.results.items() if one}
            if not held:
                return
            self._registry.post(requests.Release(key), able.difference(held))
            if time.monotonic() > deadline:
                raise ClusterError(_turn_refused(held))
            # Of two that have some ranks each, one comes first the next time.
            time.sleep(random.uniform(0.01, 0.04))

    def _share(self, rank: int, summary: Summary) -> None:
        """Yield the ranks that another client wants; runs on the I/O thread."""
        if not summary.wanted:
            return
        with self._sending:
            self._yielding = self._yielding or self._registry.owner is not None
            self._registry.owner = None
        self._yield()

    def _yield(self) -> None:
        """Yield all ranks, unless cells run that were sent without a reservation."""
        if self._yielding and not self.running():
            self._yielding = False
            self._registry.post(requests.YieldRank())

    def _send(
        self,
        execution: Execution,
        slot: RankSlot,
        request: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> None:
        if slot.alive:
            future: Any = private.send(
                self._registry.client,
                "shell",
                "execute_request",
                request,
                slot.uuid,
                metadata={"rankscope": metadata},
                on_iopub=lambda message: self._receive(execution, slot, message),
            )
            with self._lock:
                sent = self._running.get(execution, {})
                sent[slot.rank] = _Sent(future, time.monotonic())
            future.add_done_callback(
                lambda done: self._on_reply(execution, slot.rank, done)
            )
        if not slot.alive:
            # Also where the engine died while the request was on its way.
            execution.finish(slot.rank, _engine_died(slot))

    def _receive(
        self, execution: Execution, slot: RankSlot, message: private.Message
    ) -> None:
        if message["header"]["msg_type"] == message_types.ERROR and slot.alive:
            self._registry.record_summary(slot.rank, message["content"]["summary"])
        execution.receive(slot.rank, message)

    def _on_reply(self, execution: Execution, rank: int, done: Future[Any]) -> None:
        """Handle a rank's reply: the rank is done once its last output has arrived."""
        reply = done.result()
        future: Any = done
        if getattr(reply, "ename", "") == "EngineError":
            # The registry reports the death, with its reason.
            private.finish_output(future)
            return
        error = None
        if isinstance(reply, ipyparallel.error.RemoteError):
            trace = tuple((reply.traceback or "").splitlines())
            error = RankError(rank, reply.ename, reply.evalue, trace, execution.cell)
        elif isinstance(reply, Exception):
            what = (type(reply).__name__, str(reply))
            error = RankError(rank, *what, (), execution.cell)

        def finish(output: Future[Any]) -> None:
            self._hear(future)
            execution.finish(rank, error, heard=True)

        future.output.add_done_callback(finish)

    def _hear(self, future: Any) -> None:
        """Go on to receive what threads and children of an ended cell print."""
        client = self._registry.client
        private.keep_listening(client, future)
        with self._lock:
            self._heard.append(future.msg_id)
            old = self._heard.popleft() if len(self._heard) > HEARD else None
        if old is not None:
            private.discard_request(client, old)

    def _remove(self, execution: Execution) -> None:
        with self._lock:
            self._running.pop(execution, None)
        self._yield()

    def running(self) -> list[Execution]:
        with self._lock:
            return list(self._running)

    # -- lost connections --------------------------------------------------

    def _probe_for_lost_cells(self, rank: int, summary: Summary) -> None:
        """Probe a rank that reports idle while a cell should run there.

        Runs on the I/O thread. A message that is sent while the connection to the
        controller is down is lost. The probe is sent on the channel of the cells, which
        keeps the order: a cell that has no reply when the probe's reply, and all output
        before that, has arrived will never get a reply.
        """
        if summary.busy or summary.dead:
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
            pending = self._probes.get(rank)
            if not about or (pending and now - pending.at < PATIENCE):
                return
            if pending is not None:
                private.discard_request(self._registry.client, pending.future.msg_id)
            uuid = self._registry.slots[rank].uuid
            future: Any = private.probe(self._registry.client, uuid)
            self._probes[rank] = _Probe(future, now, about)
        future.add_done_callback(
            lambda done: future.output.add_done_callback(
                lambda output: self._on_probe_reply(rank, future)
            )
        )

    def _on_probe_reply(self, rank: int, future: Any) -> None:
        """End the cells of a probe: the rank has handled all that was sent before."""
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
            private.discard_request(self._registry.client, sent.msg_id)
            if sent.done() and isinstance(sent.result(), Exception):
                # The reply arrived; only output is missing.
                private.finish_output(sent)
            execution.finish(rank, _connection_lost(rank, ended=sent.done()))

    # -- deaths ------------------------------------------------------------

    def engine_died(self, slot: RankSlot) -> None:
        for execution in self.running():
            if slot.rank in execution.ranks:
                execution.finish(slot.rank, _engine_died(slot))

    def abandon(self, ename: str, evalue: str) -> None:
        """End every cell on every rank: no reply will be received any more."""
        for execution in self.running():
            for rank in execution.ranks_running:
                error = RankError(rank, ename, evalue, reason=evalue)
                execution.finish(rank, error)


def _turn_refused(held: Mapping[int, requests.Holder]) -> str:
    first = next(iter(held.values()))
    cell = "a cell" if first["cell"] is None else f"cell {first['cell']}"
    return (
        f"{tell_ranks(held, 'runs')} {cell} of {first['who']}, for "
        f"{first['seconds']:.0f} s, so nothing was sent. Wait for its end or interrupt "
        "it there, then run this cell again"
    )


def _engine_died(slot: RankSlot) -> RankError:
    cause = slot.reason_without_rank
    culprits = slot.culprits
    return RankError(slot.rank, "EngineDied", cause, culprits=culprits, reason=cause)


def _connection_lost(rank: int, *, ended: bool) -> RankError:
    if ended:
        what = f"the cell ended on rank {rank}, but some of its output is lost"
    else:
        what = f"it is not known whether the cell ran to its end on rank {rank}"
    reason = f"the connection to the controller failed for a while: {what}"
    return RankError(
        rank,
        "ConnectionLost",
        f"{reason}. Look at the rank's variables before you run it again",
        reason=reason,
    )
