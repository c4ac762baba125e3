"""BoardFeed: carries news of the ranks to the pages that show them.

Nothing runs while nobody looks. While somebody does, one thread takes in what
changed and sends it, at most ten times a second and so that it never uses more
than a twenty-fifth of a core.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from rankscope.backends.diagnosis import Verdict
from rankscope.engines import ClusterError, ClusterStatus

from .board_model import BoardModel, Message

__all__ = ["BoardFeed", "Watched"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Seconds between two messages at least, and between two looks at every rank.
INTERVAL = 0.1
LOOK = 1.0
#: Rests for so many times what a round cost.
REST = 24.0
#: Seconds after which a page that says nothing is taken for closed: it speaks
#: every 15 s, and a hidden one is slowed down to once a minute.
LEASE = 150.0
#: Seconds without a change after which things are as they will stay for a
#: while, and after which they are noted even if they never settle.
SETTLED = 2.0
RESTLESS = 15.0


class Watched(Protocol):
    """What the feed needs of a cluster."""

    @property
    def n(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def glance(self, ranks: Iterable[int] | None = None) -> ClusterStatus: ...

    def subscribe(
        self, callback: Callable[[int, dict[str, Any]], None]
    ) -> Callable[[], None]: ...


class BoardFeed:
    """Keeps a `BoardModel` up to date for viewers, and sends what changes.

    `send` gets each message, `settled` is called when the state has changed and
    is worth keeping; both on the feed's thread. `occupied` says whether pages
    cannot be heard now, so that their silence means nothing. Every method may
    be called from any thread.
    """

    def __init__(
        self,
        cluster: Watched,
        send: Callable[[Message], None],
        settled: Callable[[], None],
        occupied: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = BoardModel()
        self._cluster = cluster
        self._send = send
        self._settled = settled
        self._occupied = occupied
        # Held while the model is used, and while what it says is sent.
        self._lock = threading.RLock()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._dirty: set[int] = set()
        self._viewers: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._looked = 0.0
        self._changed: float | None = None
        self._kept = 0.0

    # -- viewers ------------------------------------------------------------

    def watch(self, viewer: str) -> None:
        """Note that a page looks; from now on it is sent what changes."""
        with self._lock:
            new = viewer not in self._viewers
            self._viewers[viewer] = time.monotonic()
            if self._closing.is_set() or self._cluster.closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rankscope-board", daemon=True
                )
                self._thread.start()
        if new:
            self.sync()

    def unwatch(self, viewer: str) -> None:
        """Note that a page looks no more."""
        with self._lock:
            self._viewers.pop(viewer, None)
        self._news.set()

    def sync(self) -> None:
        """Send everything, for a page that has nothing or missed something."""
        with self._lock:
            self.refresh()
            self._send(self.model.full())

    @property
    def running(self) -> bool:
        """Whether anything is done at all."""
        return self._thread is not None

    # -- state --------------------------------------------------------------

    def refresh(self) -> None:
        """Bring the model up to date now."""
        with self._lock:
            self._take(None)

    def full(self) -> Message:
        """The whole state as it was last sent."""
        with self._lock:
            if not self.model.ranks:
                self._take(None)
            return self.model.full()

    def read(self, look: Callable[[BoardModel], T]) -> T:
        """Return ``look(model)`` of the model brought up to date."""
        with self._lock:
            if not self._closing.is_set() and not self._cluster.closed:
                self._take(None)
            return look(self.model)

    def judge(self, verdicts: Iterable[Verdict]) -> None:
        """Show these verdicts from now on."""
        with self._lock:
            self.model.judge(verdicts)
        self._news.set()

    def nudge(self) -> None:
        """Look at every rank now: something was done to them."""
        self._looked = 0.0
        self._news.set()

    def close(self) -> None:
        """End the thread; the model keeps the state that was last."""
        with self._lock:
            if not self._closing.is_set() and not self._cluster.closed:
                self._take(None)
            self._closing.set()
            self._stop()
            thread, self._thread = self._thread, None
        self._news.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _stop(self) -> None:
        """Say that this is the end; the ranks stay as they were last seen."""
        if self.model.head:
            self.model.head = {**self.model.head, "state": "stopped"}
            message = self.model.delta()
            if message is not None and self._viewers:
                self._send(message)

    def _take(self, ranks: set[int] | None) -> bool:
        """Take in `ranks` (``None``: all); say whether the cluster is there."""
        if ranks is not None and not ranks:
            self.model.now = time.monotonic()
            return not self._cluster.closed
        status = self._cluster.glance(ranks)
        # Asked afterwards: ranks that are being shut down are not dying.
        if self._cluster.closed:
            return False
        now = time.monotonic()
        if ranks is None:
            self._looked = now
        self.model.take(status, now, self._cluster.n)
        return True

    # -- the thread ---------------------------------------------------------

    def _heard(self, rank: int, summary: dict[str, Any]) -> None:
        self._dirty.add(rank)
        self._news.set()

    def _run(self) -> None:
        try:
            cancel = self._cluster.subscribe(self._heard)
        except ClusterError:
            # Shut down a moment ago.
            return
        try:
            while not self._closing.is_set():
                self._news.wait(LOOK)
                self._news.clear()
                began = time.thread_time()
                try:
                    if not self._round():
                        return
                except Exception:  # noqa: BLE001
                    # A message that nobody could foresee: the next may be fine.
                    _log.exception("the board could not be brought up to date")
                cost = time.thread_time() - began
                self._closing.wait(max(INTERVAL, REST * cost))
        finally:
            cancel()

    def _round(self) -> bool:
        """Take in and send what changed; say whether to go on."""
        now = time.monotonic()
        with self._lock:
            self._expire(now)
            if not self._viewers or self._closing.is_set():
                self._thread = None
                return False
            dirty, self._dirty = self._dirty, set()
            if not self._take(None if now - self._looked >= LOOK else dirty):
                self._closing.set()
                self._thread = None
                self._stop()
                self._settled()
                return False
            message = self.model.delta()
            if message is not None:
                self._send(message)
        if message is not None and self._changed is None:
            self._changed = now
            self._kept = now
        if message is not None:
            self._changed = now
        self._keep(now)
        return True

    def _keep(self, now: float) -> None:
        if self._changed is None:
            return
        if now - self._changed >= SETTLED or now - self._kept >= RESTLESS:
            self._changed = None
            self._settled()

    def _expire(self, now: float) -> None:
        if self._occupied():
            self._viewers = dict.fromkeys(self._viewers, now)
            return
        self._viewers = {
            viewer: heard
            for viewer, heard in self._viewers.items()
            if now - heard < LEASE
        }
