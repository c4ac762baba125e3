"""The notebook's end of the control channel: ask all ranks at once, with a deadline."""

from __future__ import annotations

import concurrent.futures
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from . import private
from .errors import ClusterError

__all__ = ["Answers", "ControlChannel", "each_once", "name_ranks"]


@dataclass
class Answers:
    """What the ranks answered, and why some did not."""

    results: dict[int, Any] = field(default_factory=dict)
    #: Rank → why there is no result.
    errors: dict[int, str] = field(default_factory=dict)

    def all(self) -> dict[int, Any]:
        """Return the results; raise `ClusterError` if a rank gave none."""
        if self.errors:
            raise ClusterError(each_once(self.errors))
        return self.results


def each_once(said: Mapping[int, str]) -> str:
    """Return what ranks said in one line; what several said alike, once."""
    ranks: dict[str, list[int]] = {}
    for rank, what in sorted(said.items()):
        # Many errors name the rank that they are of.
        impersonal = re.sub(rf" on rank {rank}\b", "", what)
        ranks.setdefault(impersonal, []).append(rank)
    return "; ".join(f"{name_ranks(who)}: {what}" for what, who in ranks.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """``"rank 2"``, ``"ranks 0, 1"``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class ControlChannel:
    """Requests to the agents, served while the engines' main threads are blocked.

    May be used from any thread, whatever the notebook kernel's own main
    thread does; only `ask` must not be called on the client's I/O thread,
    which has to bring the answers.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._pending: dict[str, set[Future[Any]]] = {}
        self._lock = threading.Lock()

    def post(self, uuid: str, op: str, args: Mapping[str, Any]) -> Future[Any]:
        """Send one request without waiting; return the Future of its reply."""
        future = private.send(
            self._client,
            "control",
            "rankscope_request",
            {"op": op, "args": dict(args)},
            uuid,
        )
        with self._lock:
            self._pending.setdefault(uuid, set()).add(future)
        future.add_done_callback(lambda done: self.settle(uuid, done))
        return future

    def settle(self, uuid: str, future: Future[Any]) -> None:
        """Wait for this reply no more."""
        with self._lock:
            self._pending.get(uuid, set()).discard(future)

    def signal(self, uuid: str, signum: int) -> Future[Any]:
        """Have the engine's nanny send it a signal."""
        return private.send(
            self._client, "control", "signal_request", {"sig": int(signum)}, uuid
        )

    def lost(self, uuid: str, why: str) -> None:
        """Fail what still waits for an engine that is gone."""
        with self._lock:
            waiting = self._pending.pop(uuid, set())
        for future in list(waiting):
            if not future.done():
                future.set_exception(ClusterError(why))

    def ask(
        self,
        uuids: Mapping[int, str],
        op: str,
        args: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
        timeout: float = 2.0,
    ) -> Answers:
        """Ask the ranks in `uuids` at once; wait at most `timeout` seconds.

        `args` are the same for all, or made by ``args(rank)``. A rank that
        does not answer, or whose agent raises, is in ``Answers.errors``; the
        other ranks' results are returned all the same.
        """
        if threading.current_thread() is private.io_thread(self._client):
            raise RuntimeError(f"{op}: the I/O thread cannot wait for answers")
        deadline = time.monotonic() + timeout
        futures = {
            rank: self.post(uuid, op, args(rank) if callable(args) else args or {})
            for rank, uuid in uuids.items()
        }
        concurrent.futures.wait(futures.values(), max(0.0, deadline - time.monotonic()))
        answers = Answers()
        for rank, future in futures.items():
            self._sort(answers, rank, future, uuids[rank], timeout)
        return answers

    def _sort(
        self,
        answers: Answers,
        rank: int,
        future: Future[Any],
        uuid: str,
        timeout: float,
    ) -> None:
        if not future.done():
            private.forget(self._client, future.msg_id)  # type: ignore[attr-defined]
            self.settle(uuid, future)
            answers.errors[rank] = f"no answer within {timeout:g} s"
            return
        error = future.exception()
        if error is not None:
            answers.errors[rank] = str(error)
            return
        content = future.result()["content"]
        if content["ok"]:
            answers.results[rank] = content["result"]
        else:
            answers.errors[rank] = _told(content["ename"], content["evalue"])


def _told(ename: str, evalue: str) -> str:
    """An error of an agent: our own are sentences that need no name before them."""
    ours = ename.startswith(("ClusterError", "Dist"))
    return evalue if ours and evalue else f"{ename}: {evalue}"
