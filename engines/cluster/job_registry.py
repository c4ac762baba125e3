"""JobRegistry: the ranks of a script's job, as an attached notebook sees them."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import uuid
from concurrent.futures import Future
from typing import Any

from rankscope.backends.bounded_get import bounded_get
from rankscope.backends.errors import DistError, DistStoreError
from rankscope.backends.rank_sets import name_ranks
from rankscope.backends.stores.tcp import TCPStore
from rankscope.backends.thread_start import start_thread

from ..errors import ClusterError
from ..observe.rank_registry import RankRegistry
from ..observe.rank_slots import RankSlot
from ..status import NOTHING_REPORTED, Summary
from ..wire.job_channel import ENDED, answer_key, append, end_key, status_key
from ..wire.requests import PublishStatus, Request

__all__ = ["JobRegistry"]

_log = logging.getLogger(__name__)

#: Seconds for which the ranks publish their status, and after which it is renewed.
LEASE = 30.0
RENEWAL = 10.0
#: Seconds between two readings of the status of all ranks at least, and for each rank:
#: rank 0 serves them beside its script; at most, so that no rank counts as silent.
INTERVAL = 0.4
RANK_INTERVAL, MOST_INTERVAL = 0.005, 1.5
#: Seconds that the channel may take to answer a reading.
READ_WAIT = 2.0
#: Ranks whose faults the reason of a job's end names.
_NAMED = 3


class JobRegistry(RankRegistry):
    """The `size` ranks behind the channel of a job, which it owns: `store`."""

    def __init__(self, store: TCPStore, size: int, attends: bool = True) -> None:
        super().__init__()
        self._attends = attends
        #: Why the job has ended; ``None`` while it runs.
        self.ended: str | None = None
        self.slots = [RankSlot(rank) for rank in range(size)]
        self._store = store
        self._reported: set[int] = set()
        self._seen: dict[int, bytes] = {}
        self._posts: queue.SimpleQueue[tuple[int, bytes, Future[Any]] | None]
        self._posts = queue.SimpleQueue()
        self._pending: dict[Future[Any], int] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        for rank in range(size):
            self._watch_status(rank)
            self._watch_end(rank)
        self._thread = start_thread("job-registry", self._run)

    def _watch_status(self, rank: int) -> None:
        self._store.watch(status_key(rank), lambda _: self._reported.add(rank))

    def _watch_end(self, rank: int) -> None:
        self._store.watch(
            end_key(rank), lambda death: self._mark_dead(rank, death.decode())
        )

    # -- requests ------------------------------------------------------------------

    def _post(self, slot: RankSlot, request: Request[Any]) -> Future[Any]:
        number = uuid.uuid4().hex
        message = json.dumps({"id": number, **request.content()}).encode()
        future: Future[Any] = Future()
        with self._lock:
            if self.ended is not None or self._closed.is_set():
                future.set_exception(ClusterError(self.ended or "detached"))
                return future
            self._pending[future] = slot.rank
        try:
            cancel = self._store.watch(
                answer_key(number), lambda answer: _resolve(future, answer)
            )
        except DistError as error:
            _fail(future, str(error))
        else:
            future.add_done_callback(lambda _: cancel())
        future.add_done_callback(self._forget)
        self._posts.put((slot.rank, message, future))
        return future

    def _give_up(self, slot: RankSlot, future: Future[Any]) -> None:
        future.cancel()

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.pop(future, None)

    # -- status --------------------------------------------------------------------

    def start_status(self, timeout: float) -> None:
        self._record_all(self.ask(self._wanted, timeout=timeout))

    def _is_of(self, slot: RankSlot, summary: Summary) -> bool:
        """Note the process of the summary: one that replaces another counts anew."""
        if not slot.alive and slot.pid != summary.pid:
            slot.summary = NOTHING_REPORTED
            slot.death = slot.death_cause = None
            self._watch_end(slot.rank)
            self.post(self._wanted, [slot.rank])
        slot.pid, slot.host = summary.pid, summary.host
        return True

    @property
    def _wanted(self) -> PublishStatus:
        return PublishStatus(LEASE, self._interval, self._attends)

    @property
    def _interval(self) -> float:
        return min(MOST_INTERVAL, max(INTERVAL, RANK_INTERVAL * len(self.slots)))

    # -- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        renewed = read = time.monotonic()
        while not self._closed.is_set():
            try:
                pause = read + self._interval - time.monotonic()
                self._send(bounded_get(self._posts, pause))
                continue
            except queue.Empty:
                pass
            read = time.monotonic()
            try:
                if read - renewed > RENEWAL:
                    renewed = read
                    self.post(self._wanted)
                self._read()
            except DistError as error:
                if self._closed.is_set():
                    return
                if self._store.lost:
                    self._end(_cause(error))
                    return
                # Rank 0 is silent: the ages of the last summaries show it.
                _log.debug("no status: %s", error)

    def _send(self, post: tuple[int, bytes, Future[Any]] | None) -> None:
        if post is None:
            return
        rank, message, future = post
        try:
            if not future.done():
                append(self._store, f"request/{rank}", message)
        except DistError as error:
            _fail(future, str(error))

    def _read(self) -> None:
        # Dead ones, too: their launcher may replace them.
        ranks = sorted(self._reported)
        values = self._store.multi_get([*map(status_key, ranks)], READ_WAIT)
        for rank, value in zip(ranks, values, strict=True):
            if self._seen.get(rank) == value:
                continue
            self._seen[rank] = value
            self.record_summary(rank, value)
            self._call_subscribers(self.slots[rank])
        if not values and self._store.lost:
            raise DistStoreError("the connection was lost")

    def _mark_dead(self, rank: int, death: str) -> None:
        slot = self.slots[rank]
        with self._lock:
            if not slot.alive:
                return
            slot.death = slot.death_cause = death
            waiting = [one for one, asked in self._pending.items() if asked == rank]
        for future in waiting:
            _fail(future, death)
        self._call_subscribers(slot)

    # -- the end ---------------------------------------------------------------------

    def _end(self, cause: str) -> None:
        """Note that the job has ended: why its ranks did, or else `cause`."""
        # The callbacks with the last words of ranks have run then.
        self._store.close()
        deaths = [slot.death for slot in self.slots if slot.death is not None]
        faults = [death for death in deaths if not death.endswith(ENDED)]
        why = "; ".join(faults[:_NAMED]) or (ENDED if deaths else cause)
        left = [slot.rank for slot in self.slots if slot.alive]
        if deaths and left and not faults:
            why = (
                f"{why} on rank 0, which shows the others; should {name_ranks(left)} "
                "go on, rankscope diagnose in a terminal there says what they do"
            )
        with self._lock:
            self.ended = f"the job has ended: {why}"
            waiting = list(self._pending)
        for future in waiting:
            _fail(future, self.ended)

    def close(self) -> None:
        """Disconnect and end the thread; the job goes on."""
        self._closed.set()
        self._posts.put(None)
        with self._lock:
            waiting = list(self._pending)
        for future in waiting:
            _fail(future, "this notebook has detached from the job")
        # Ends every wait of the thread: rank 0, which serves the store, may be silent.
        self._store.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _resolve(future: Future[Any], answer: bytes) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result({"content": json.loads(answer)})


def _fail(future: Future[Any], why: str) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(ClusterError(why))


def _cause(error: DistError) -> str:
    """Return how the process of rank 0 ended, as the store's error says it."""
    text = str(error)
    return text.partition(": ")[2].removesuffix("; the group must be made again")
