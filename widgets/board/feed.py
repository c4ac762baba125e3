"""BoardFeed: sends changes of the ranks' status to the pages that show them.

No thread runs while no page shows the board. While one does, one thread updates the
model and sends what changed, at most ten times a second, and uses at most a
fortieth of a core.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rankscope.backends.observe.lateness import GroupLateness
from rankscope.backends.observe.verdicts import Verdict
from rankscope.backends.thread_start import start_thread
from rankscope.engines import ClusterError, ObservedRanks
from rankscope.engines.status import Summary

from .late import LateWatch
from .model import BoardModel, Message

__all__ = ["BoardFeed"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Seconds between two messages at least, and between two updates of all ranks.
INTERVAL = 0.1
FULL_REFRESH = 1.0
#: Seconds after the last message after which a beat is sent: a page that gets none for
#: 10 s shows that the kernel is gone.
BEAT = 2.0
#: The thread pauses for this many times the processor time of the last update, but for
#: no more seconds than this: without a beat a page takes the kernel for gone.
REST_FACTOR, LONGEST_REST = 39.0, 5.0
#: Seconds without a message after which a page counts as closed: it sends one every
#: 15 s, and a browser slows the timer of a hidden page down to once a minute.
VIEWER_TIMEOUT = 150.0
#: Seconds without a change after which the state counts as settled: of ranks that are
#: in cells, and of others. It is reported as settled after so many although it changes.
SETTLED = 2.0
AT_REST = 0.1
NEVER_SETTLED = 15.0
#: Seconds that the ranks have to say how a cell has ended that no page shows.
ANSWER = 0.3


class BoardFeed:
    """Keeps a `BoardModel` up to date for viewers, and sends what changes.

    Every method may be called from any thread. On the feed's thread ``send(message)``
    gets each message for the pages, and ``settled()`` is called when the state has
    changed and settled: at once where cells end, or a hang begins or ends. (Where no
    thread runs, `report_end` calls it.)
    ``pages_blocked()`` is whether messages of pages cannot arrive now (a cell blocks
    the main thread), so that no page is taken for closed. Two messages are `interval`
    seconds apart at least.
    """

    def __init__(
        self,
        cluster: ObservedRanks,
        send: Callable[[Message], None],
        settled: Callable[[], None],
        pages_blocked: Callable[[], bool] = lambda: False,
        interval: float = INTERVAL,
    ) -> None:
        self.model = BoardModel()
        self._cluster = cluster
        self._send_message = send
        self._settled = settled
        self._pages_blocked = pages_blocked
        self._interval = interval
        # Held while the model is used and while its messages are sent.
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._dirty: set[int] = set()
        self._viewers: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._refreshed_at = 0.0
        # The version of the model, and its banner, at the last look.
        self._noted: tuple[int, Message] = (0, {})
        self._changed_at: float | None = None
        self._changing_since = 0.0
        self._reported_at = 0.0
        self._sent_at = 0.0
        self._late = LateWatch(cluster, self._show_lateness)

    # -- viewers ------------------------------------------------------------

    def watch(self, viewer: str) -> None:
        """Send changes to the page `viewer` from now on; to be called every 15 s."""
        with self._lock:
            new = viewer not in self._viewers
            self._viewers[viewer] = time.monotonic()
            if self._closing.is_set() or self._cluster.closed:
                return
            if self._thread is None:
                self._thread = start_thread("board", self._run)
        if new:
            self.send_full()

    def unwatch(self, viewer: str) -> None:
        """Send no more changes for the page `viewer`."""
        with self._lock:
            self._viewers.pop(viewer, None)
        self._wake.set()

    def send_full(self) -> None:
        """Send the whole state, for a page that opens or has missed a message."""
        with self._lock:
            self.refresh()
            self._send(self.model.full())

    @property
    def running(self) -> bool:
        """Whether the feed's thread runs."""
        return self._thread is not None

    # -- state --------------------------------------------------------------

    def refresh(self) -> None:
        """Update the model now."""
        with self._lock:
            self._update_model(None)

    def full(self) -> Message:
        """Return the whole state as it was last sent."""
        with self._lock:
            if not self.model.ranks:
                self._update_model(None)
            return self.model.full()

    def read(self, function: Callable[[BoardModel], T]) -> T:
        """Update the model and return ``function(model)``."""
        with self._lock:
            self._update_model(None)
            return function(self.model)

    def show_verdicts(self, verdicts: Iterable[Verdict]) -> None:
        """Show these verdicts from now on."""
        with self._lock:
            self.model.show_verdicts(verdicts)
        self._wake.set()

    def _show_lateness(self, groups: Sequence[GroupLateness]) -> None:
        with self._lock:
            if not self._closing.is_set():
                self.model.show_lateness(groups)
        self._wake.set()

    def refresh_soon(self) -> None:
        """Update all ranks with the next message: an action has changed them."""
        self._refreshed_at = 0.0
        self._wake.set()

    @property
    def closed(self) -> bool:
        """Whether the model keeps the last state: of the cluster, or before `close`."""
        return self._closing.is_set()

    def close(self) -> None:
        """End the thread; the model keeps the last state."""
        with self._lock:
            if self._update_model(None):
                self._end()
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._late.join()

    def _send(self, message: Message) -> None:
        self._sent_at = time.monotonic()
        self._send_message(message)

    def _end(self) -> None:
        """Send that the cluster has stopped; the rows keep their last state."""
        self._closing.set()
        if self.model.head:
            stopped: dict[str, Any] = {
                "state": "stopped",
                "stopped_at": time.strftime("%H:%M:%S"),
                "detached": self._cluster.detached,
            }
            if self._cluster.ended is not None:
                stopped["ended"] = self._cluster.ended
            self.model.head = {**self.model.head, **stopped}
            message = self.model.delta()
            if message is not None and self._viewers:
                self._send(message)

    def _update_model(self, ranks: set[int] | None) -> bool:
        """Update `ranks` (``None``: all); return whether the cluster still runs."""
        if self._closing.is_set():
            return False
        status = self._cluster.glance(ranks) if ranks != set() else None
        now = time.monotonic()
        # Checked after the status: one of ranks that are ended is of no use.
        if self._cluster.closed:
            if self._cluster.ended is None:
                # That of the moment before, which `shutdown` has requested.
                self.model.update(self._cluster.glance(), now, self._cluster.n)
            self._end()
            return False
        if ranks is None:
            self._refreshed_at = now
        if status is None:
            self.model.now = now
        else:
            self.model.update(status, now, self._cluster.n)
        return True

    # -- the thread ---------------------------------------------------------

    def _on_status(self, rank: int, summary: Summary) -> None:
        self._dirty.add(rank)
        self._wake.set()

    def _run(self) -> None:
        try:
            cancel = self._cluster.subscribe(self._on_status)
        except ClusterError:
            # The cluster was shut down a moment ago: the loop finds that it has ended.
            cancel = _nothing
        try:
            while not self._closing.is_set():
                pending = self._changed_at is not None and self.model.rests
                self._wake.wait(AT_REST if pending else FULL_REFRESH)
                self._wake.clear()
                began = time.thread_time()
                try:
                    if not self._refresh_once():
                        return
                except Exception:  # noqa: BLE001
                    # An unexpected status: the next one may be fine.
                    _log.exception("the board could not be updated")
                cost = time.thread_time() - began
                rest = max(self._interval, REST_FACTOR * cost)
                self._closing.wait(min(rest, LONGEST_REST))
        finally:
            cancel()

    def _refresh_once(self) -> bool:
        """Update and send what changed; return whether to continue."""
        now = time.monotonic()
        with self._lock:
            self._expire(now)
            if not self._viewers or self._closing.is_set():
                self._thread = None
                return False
            dirty, self._dirty = self._dirty, set()
            if not self._update_model(
                None if now - self._refreshed_at >= FULL_REFRESH else dirty
            ):
                self._thread = None
                self._settled()
                return False
            self._late.look(self.model.issued, now)
            message = self.model.delta()
            if message is not None:
                self._send(message)
            elif now - self._sent_at >= BEAT:
                self._send({"type": "beat", "now": now})
        self._report_settled(now)
        return True

    def _report_settled(self, now: float) -> None:
        """Report the state if it has changed and settled."""
        # By the version: other threads send changes, too.
        before, self._noted = self._noted, (self.model.version, self.model.told)
        if self._noted[0] != before[0]:
            if self._changed_at is None:
                self._changing_since = now
            self._changed_at = now
        if self._changed_at is None:
            return
        turned = self._noted[1] != before[1]
        quiet = now - self._changed_at
        if self.model.rests:
            # Of idle ranks the memory may change again and again.
            often = now - self._reported_at < SETTLED
            settled = turned or (quiet >= AT_REST and not often)
        else:
            settled = quiet >= SETTLED or now - self._changing_since >= NEVER_SETTLED
        if settled:
            self._changed_at, self._reported_at = None, now
            self._settled()

    def report_end(self) -> None:
        """Call ``settled()`` with the end of a cell: as soon as no rank is in one.

        Where no page shows the board no thread would notice, and nothing that comes
        later need be kept: the ranks are asked, and it is called before the return.
        """
        self._reported_at = 0.0
        self._wake.set()
        if self.running or self._closing.is_set():
            return
        self._cluster.status(fresh=True, timeout=ANSWER)
        with self._lock:
            changed = self._update_model(None) and self.model.delta() is not None
        if changed:
            self._settled()

    def _expire(self, now: float) -> None:
        if self._pages_blocked():
            self._viewers = dict.fromkeys(self._viewers, now)
            return
        self._viewers = {
            viewer: last_message
            for viewer, last_message in self._viewers.items()
            if now - last_message < VIEWER_TIMEOUT
        }


def _nothing() -> None:
    """End no subscription."""
