"""The calls of torch's RPC on this rank: those it makes, and those it runs for others.

Each has the form of a flight record, so that the board, the traces and the diagnosis
need no second way.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from typing import Any

from ..groups.abort_reason import AbortReason
from ..groups.key import GroupKey
from ..work.flight_recorder import recorder
from ..work.record_fields import Frame, record_fields
from .frames import user_line
from .rpc_waits import Wait

__all__ = ["RpcCall", "RpcLog", "Served", "this_rank"]

# Calls kept after their end.
_KEPT = 1000


def this_rank() -> str:
    """Return ``rank 2``, for an error of this process."""
    return f"rank {os.environ['RANK']}" if "RANK" in os.environ else "this rank"


class RpcCall:
    """One wait for other workers: an RPC, a backward, a shutdown.

    Attributes
    ----------
    op
        ``rpc_sync``, ``rpc_async``, ``remote``, ``to_here``, ``backward``,
        ``init_rpc`` or ``shutdown``.
    worker
        The name of the worker that is called; empty where it is all of them.
    peer
        The global rank of that worker, if it is known.
    function
        The name of the function that the worker is to run.
    within
        The call of another worker on whose thread this one is made.
    """

    def __init__(self, number: int, op: str, worker: str = "", function: str = ""):
        self.number = number
        self.op = op
        self.worker = worker
        self.function = function
        self.peer: int | None = None
        self.thread = threading.get_ident()
        self.within: Served | None = None
        self.frame: Frame | None = None
        self.began_ns = time.time_ns()
        self.ended_ns = 0
        self.error: str | None = None
        #: ``issued`` until somebody waits for it, then ``started``.
        self.state = "started"

    @property
    def title(self) -> str:
        """The op with its worker, as people read it: ``rpc_sync to worker2``."""
        if not self.worker:
            return self.op
        return f"{self.op} {'from' if self.op == 'to_here' else 'to'} {self.worker}"

    @property
    def source(self) -> str:
        """The user's line; empty where it is not known."""
        return "" if self.frame is None else recorder.name_source(self.frame)

    def end(self, state: str = "completed", error: str | None = None) -> None:
        """Note its end; that of the first note, and the error of any."""
        self.ended_ns = self.ended_ns or time.time_ns()
        if self.error is None:
            self.state, self.error = state, error

    def rpc(self) -> dict[str, Any]:
        """Return the entry ``rpc`` of its record: what no collective has."""
        within = self.within
        return {
            "call": self.op,
            "worker": self.worker,
            "peer": self.peer,
            "function": self.function,
            "within": None if within is None else within.number,
        }


class Served:
    """A function that this rank runs for another worker, on a thread of torch."""

    op = "run"

    def __init__(self, number: int, function: str) -> None:
        self.number = number
        self.function = function
        self.thread = threading.get_ident()
        self.began_ns = time.time_ns()
        self.ended_ns = 0
        self.state = "serving"
        self.error: str | None = None
        #: Whether the function has returned a future that is not done.
        self.returned = False
        #: The RPCs that the function has made.
        self.calls = 0
        self._spot: tuple[Any, ...] = ()
        self._there_since = time.monotonic()

    @property
    def title(self) -> str:
        """What the rank does, as people read it: ``run forward``."""
        return f"run {self.function}"

    @property
    def frame(self) -> Frame | None:
        """The line of the user's code that the function is at."""
        if self.ended_ns or self.returned:
            return None
        return user_line(sys._current_frames().get(self.thread))

    @property
    def source(self) -> str:
        """The line that the function is at; empty where it is not known."""
        frame = self.frame
        return "" if frame is None else recorder.name_source(frame)

    def still_for(self) -> float:
        """Return the seconds for which it has been seen at one line."""
        spot = (self.frame, self.returned, self.calls)
        now = time.monotonic()
        if spot != self._spot:
            self._spot, self._there_since = spot, now
        return now - self._there_since

    def end(self) -> None:
        """Note its end."""
        self.state, self.ended_ns = "completed", time.time_ns()

    def rpc(self) -> dict[str, Any]:
        """Return the entry ``rpc`` of its record."""
        return {
            "call": self.op,
            "number": self.number,
            "function": self.function,
            "returned": self.returned,
            "still_for": 0.0 if self.ended_ns else self.still_for(),
        }


class RpcLog:
    """What this process does in torch's RPC. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, RpcCall] = {}
        self._served: dict[int, Served] = {}
        self._ended: deque[RpcCall | Served] = deque(maxlen=_KEPT)
        self._waits: dict[Wait, RpcCall | None] = {}
        self._here = threading.local()
        #: Number of an object of torch → what is known of it.
        self._known: dict[int, Any] = {}
        #: The last call that completed.
        self.completed: RpcCall | None = None

    # -- calls of this rank --------------------------------------------------

    def begin(
        self,
        op: str,
        worker: str = "",
        peer: int | None = None,
        function: str = "",
    ) -> RpcCall:
        """Note a call that begins now."""
        call = RpcCall(next(self._numbers), op, worker, function)
        call.peer = peer
        call.frame = user_line(sys._getframe(1))
        call.within = getattr(self._here, "served", None)
        if call.within is not None:
            call.within.calls += 1
        with self._lock:
            self._calls[call.number] = call
        recorder.changed()
        return call

    def attach(self, call: RpcCall, future: Any) -> None:
        """Note that `call` is over when `future` is done."""
        call.state = "issued"
        self._of_object(future, call)
        # An RPC whose future is not kept has an end too.
        future.add_done_callback(lambda _: self.end(call))

    def keep(self, rref: Any, call: RpcCall, future: Any) -> None:
        """Note that the value of `rref` is there when `future` is done."""
        self._of_object(rref, (call, future))

    def of_rref(self, rref: Any) -> tuple[RpcCall, Any] | None:
        """Return what `keep` was given for `rref`."""
        return self._known.get(id(rref))

    def _of_object(self, one: Any, known: Any) -> None:
        """Note what is known of an object of torch for as long as it is there."""
        number = id(one)
        self._known[number] = known
        weakref.finalize(one, self._known.pop, number, None).atexit = False

    def note_wait(self, call: RpcCall) -> None:
        """Note that this thread waits for `call`, which another line has issued."""
        call.state, call.thread = "started", threading.get_ident()
        call.frame = user_line(sys._getframe(1)) or call.frame
        recorder.changed()

    def of_future(self, future: Any) -> RpcCall | None:
        """Return the call whose end `future` is."""
        known = self._known.get(id(future))
        return known if isinstance(known, RpcCall) else None

    def end(self, call: RpcCall, error: BaseException | None = None) -> None:
        """Note the end of a call, by `error` if there is one."""
        if error is None:
            call.end()
        else:
            call.end("failed", str(error) or type(error).__name__)
        with self._lock:
            if self._calls.pop(call.number, None) is not None:
                self._ended.append(call)
        if call.state == "completed":
            self.completed = call
        recorder.changed()

    def in_flight(self) -> list[RpcCall]:
        """Return the calls that are not over, oldest first."""
        with self._lock:
            return list(self._calls.values())

    # -- calls that this rank runs -------------------------------------------

    def serve(self, function: str) -> Served:
        """Note that this thread runs `function` for another worker from now on."""
        served = Served(next(self._numbers), function)
        self._here.served = served
        with self._lock:
            self._served[served.number] = served
        recorder.changed()
        return served

    def leave(self, served: Served, *, returned: bool) -> None:
        """Note that the thread of `served` has left the function.

        `returned` says that the result is a future, which is not done yet.
        """
        self._here.served = None
        served.returned = returned
        if not returned:
            self.end_serving(served)

    def end_serving(self, served: Served) -> None:
        """Note the end of a function that ran for another worker."""
        served.end()
        with self._lock:
            if self._served.pop(served.number, None) is not None:
                self._ended.append(served)
        recorder.changed()

    def serving(self) -> list[Served]:
        """Return what runs for other workers, oldest first."""
        with self._lock:
            return list(self._served.values())

    # -- waits ---------------------------------------------------------------

    def add_wait(self, wait: Wait, call: RpcCall | None) -> None:
        """Have `abort` end `wait`, which belongs to `call` if it is known."""
        with self._lock:
            self._waits[wait] = call

    def wait_of(self, op: str) -> Wait | None:
        """Return the first wait there is for a call of `op`."""
        with self._lock:
            waits = [w for w, one in self._waits.items() if one and one.op == op]
        return waits[0] if waits else None

    def remove_wait(self, wait: Wait) -> None:
        """Forget a wait that is over."""
        with self._lock:
            self._waits.pop(wait, None)

    def abort(self, reason: AbortReason) -> None:
        """End the waits for the culprits of `reason`, or all where it has none."""
        with self._lock:
            waits = list(self._waits.items())
        for wait, call in waits:
            peer = None if call is None else call.peer
            if not reason.culprits or peer is None or peer in reason.culprits:
                wait.abort(reason)

    # -- records -------------------------------------------------------------

    def records(self, key: GroupKey, timeout: float) -> list[dict[str, Any]]:
        """Return the records of all calls, oldest first."""
        open_calls = self.in_flight()
        with self._lock:
            ended = list(self._ended)
        every = [*ended, *open_calls, *self.serving()]
        every.sort(key=lambda one: one.number)
        return [_record(one, key, timeout) for one in every]


def _record(call: RpcCall | Served, key: GroupKey, timeout: float) -> dict[str, Any]:
    """Return the keys of `Record.as_dict`, and ``rpc``."""
    peer = call.peer if isinstance(call, RpcCall) else None
    return {
        **record_fields(
            record_id=call.number,
            group=key.name,
            group_id=key.id,
            p2p_seq_id=call.number,
            op=call.title,
            backend="tensorpipe",
            is_p2p=True,
            state=call.state,
            peer=key.ranks.index(peer) if peer in key.ranks else None,
            timeout=timeout,
            created_ns=call.began_ns,
            started_ns=call.began_ns,
            ended_ns=call.ended_ns,
            frame=call.frame,
            name_source=recorder.name_source,
            error=call.error,
        ),
        "rpc": call.rpc(),
    }
