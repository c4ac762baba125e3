"""The publisher of a rank's status: summaries on the engine's iopub."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope.backends.observe.export import local_dump
from rankscope.backends.observe.records import Record
from rankscope.backends.thread_start import start_thread
from rankscope.backends.work.flight_recorder import recorder

from ..wire import ipyparallel_private as private
from ..wire import message_types, requests

__all__ = ["MIN_INTERVAL", "StatusPublisher"]

#: Seconds between two status messages at least, and at most.
MIN_INTERVAL = 0.1
HEARTBEAT = 1.0
#: After this many ops since the last message, and the interval then: a rank that
#: makes progress needs few messages, and each one takes CPU time from collectives.
STEADY_OPS = 50
STEADY_INTERVAL = 0.25
#: Seconds that the last message gets, and how many records it has.
LAST = 0.2
LAST_RECORDS = 50
#: Seconds after which a subscription that was not renewed ends.
LEASE = 30.0


@dataclass
class Subscription:
    """A client that gets the status until a time (``time.monotonic()``)."""

    header: dict[str, Any]
    until: float
    #: Seconds between two messages to it at least.
    interval: float
    sent_at: float = 0.0


class StatusPublisher:
    """Publishes ``summary()`` to its subscribers, on a thread of its own."""

    def __init__(
        self, kernel: Any, summary: Callable[[], requests.EncodedSummary]
    ) -> None:
        self._kernel = kernel
        self.summary = summary
        #: ``msg_id`` of its header → the subscription.
        self.subscriptions: dict[str, Subscription] = {}
        self._changed = threading.Event()
        self.thread = start_thread("status", self._run)

    @requests.Subscribe.handler
    def _subscribe(self, wanted: requests.Subscribe) -> requests.EncodedSummary:
        until, name = time.monotonic() + LEASE, wanted.header["msg_id"]
        before = self.subscriptions.get(name)
        sent_at = 0.0 if before is None else before.sent_at
        self.subscriptions[name] = Subscription(
            wanted.header, until, wanted.interval, sent_at
        )
        return self.summary()

    @requests.Unsubscribe.handler
    def _unsubscribe(self, wanted: requests.Unsubscribe) -> None:
        self.subscriptions.pop(wanted.msg_id, None)

    def is_watched_by(self, session: str) -> bool:
        """Whether a client with this session has subscribed, and renews it."""
        return any(
            one.header["session"] == session
            for one in list(self.subscriptions.values())
        )

    def note_change(self) -> None:
        """Publish soon; called at every transition of every op, on any thread."""
        # Mostly the event is set already, and setting it takes a lock.
        if not self._changed.is_set():
            self._changed.set()

    def publish_last(self) -> None:
        """Publish once more before the process is ended, with its last records."""
        # A summary alone may lack what was issued a moment ago.
        self._publish(time.monotonic(), local_dump(LAST_RECORDS)["records"])
        # Until it is sent, by threads of ipykernel and of ZeroMQ.
        time.sleep(LAST)

    def _run(self) -> None:
        issued, due = recorder.count, math.inf
        while True:
            pause = min(HEARTBEAT, due - time.monotonic())
            self._changed.wait(max(0.0, pause))
            self._changed.clear()
            try:
                due = self._publish(time.monotonic())
            except Exception:
                # This message is lost; the thread goes on.
                self._kernel.log.exception("the rank's status was not published")
            before, issued = issued, recorder.count
            steady = issued - before >= STEADY_OPS
            time.sleep(STEADY_INTERVAL if steady else MIN_INTERVAL)

    def _publish(self, now: float, last: Sequence[Record] | None = None) -> float:
        """Publish to those whose turn it is, `last` to all; return the next turn."""
        due = math.inf
        for msg_id, one in list(self.subscriptions.items()):
            if now > one.until:
                self.subscriptions.pop(msg_id, None)
            elif last is None and now - one.sent_at < one.interval:
                due = min(due, one.sent_at + one.interval)
            else:
                one.sent_at = now
                private.publish(
                    self._kernel,
                    message_types.STATUS,
                    {"summary": self.summary()} | ({"records": last} if last else {}),
                    one.header,
                )
        return due
