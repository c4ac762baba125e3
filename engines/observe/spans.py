"""Spans: a span for each hang and each abort, by OpenTelemetry's API.

Where they go is what the SDK of the program is told; without an SDK they go nowhere.
They are made on a thread of their own, since an exporter may take its time.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rankscope import __version__
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import Verdict
from rankscope.backends.thread_start import start_thread

from ..status import ClusterStatus, GroupStatus, OpStatus, Summary
from .observed_ranks import ObservedRanks

__all__ = ["Spans", "spans_if_installed"]

#: Why a group was aborted that was rebuilt before a look.
UNSEEN = "not known: it was rebuilt before a status was read"

#: Seconds that the end waits for an exporter.
_END_WAIT = 2.0


class Spans:
    """Makes spans of what a `StallWatch` and the summaries of ranks tell.

    ``rankscope.stall`` lasts from the entry of the first rank into an op that hangs to
    its end, ``rankscope.abort`` from the abort of a group to its rebuild; both to
    `close` at the latest. Their attributes are ``rankscope.group``, ``.ranks``, those
    at fault or those of the aborted group, ``.verdict``, the sentence or the reason of
    the abort, ``.op`` and ``.seq``, and of a stall ``.fault``, ``.waiting``, ``.line``.
    Those of an abort are of the op with the lowest number that a rank had issued and
    not completed, if there is one. Of an abort that was rebuilt before a look, only the
    group is known, and that it was after the look before.

    `tracer` is one of OpenTelemetry.
    """

    def __init__(self, cluster: ObservedRanks, tracer: Any) -> None:
        self._cluster, self._tracer = cluster, tracer
        # Op that hangs → its span.
        self._stalls: dict[tuple[GroupKey, int], Any] = {}
        # Group → its newest generation, and the span of its abort.
        self._aborts: dict[GroupKey, tuple[int, Any]] = {}
        # Group → how often it was aborted, and when that was reported last.
        self._counted: dict[GroupKey, tuple[int, int]] = {}
        # Group → number and rank of the op in the span of its abort.
        self._ended: dict[GroupKey, tuple[int, int]] = {}
        # What each rank has reported last.
        self._told: dict[tuple[int, GroupKey], tuple[int, str, Any]] = {}
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = start_thread("spans", self._run)
        self._cancel = cluster.subscribe(self.note_status)

    def note_status(self, rank: int, summary: Summary) -> None:
        for one in summary.groups:
            # Each rank reports many times a second.
            ended = _not_completed(one)
            now = one.generation, one.state, ended and (ended.op, ended.seq)
            if self._told.get((rank, one.key)) != now:
                self._told[rank, one.key] = now
                self._todo.put(partial(self._abort, rank, one, ended, time.time_ns()))

    def note_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        status = self._cluster.glance()
        self._todo.put(partial(self._stall, [*verdicts], status, time.time_ns()))

    def close(self) -> None:
        """End all spans, and wait for a slow exporter for `_END_WAIT` seconds."""
        self._cancel()
        self._todo.put(None)
        self._thread.join(_END_WAIT)

    def _run(self) -> None:
        while (step := self._todo.get()) is not None:
            step()
        for span in self._stalls.values():
            span.end()
        for _, span in self._aborts.values():
            if span is not None:
                span.end()

    def _stall(
        self, verdicts: Sequence[Verdict], status: ClusterStatus, at: int
    ) -> None:
        hung = {(one.group, one.seq): one for one in verdicts}
        for op in [one for one in self._stalls if one not in hung]:
            self._stalls.pop(op).end(at)
        for op, one in hung.items():
            span = self._stalls.get(op)
            if span is None:
                span = self._stalls[op] = self._tracer.start_span(
                    "rankscope.stall", start_time=at - _age(one, status)
                )
            # A verdict may become another one while the op hangs.
            span.set_attributes(
                {
                    "rankscope.group": one.group.name,
                    "rankscope.ranks": one.culprits,
                    "rankscope.waiting": one.waiting,
                    "rankscope.op": one.op,
                    "rankscope.seq": one.seq,
                    "rankscope.fault": one.fault.value,
                    "rankscope.verdict": str(one),
                    "rankscope.line": one.line,
                }
            )

    def _abort(
        self, rank: int, group: GroupStatus, ended: OpStatus | None, at: int
    ) -> None:
        key, generation = group.key, group.generation
        newest, span = self._aborts.get(key, (-1, None))
        counted, looked = self._counted.get(key, (group.aborts, at))
        self._counted[key] = max(counted, group.aborts), at
        if generation > newest and span is not None:
            # It is rebuilt.
            span.end(at)
            span = None
        if generation < newest:
            return
        is_aborted = group.state == "aborted"
        for _ in range(counted, group.aborts - is_aborted):
            self._start(key, UNSEEN, looked).end(at)
        if is_aborted and span is None:
            self._ended.pop(key, None)
            span = self._start(key, group.why, at)
        if span is not None and ended is not None and ended.seq is not None:
            # The ranks report one after the other.
            place = ended.seq, rank
            if place < self._ended.get(key, (place[0] + 1, 0)):
                self._ended[key] = place
                span.set_attributes(
                    {"rankscope.op": ended.op, "rankscope.seq": ended.seq}
                )
        self._aborts[key] = generation, span

    def _start(self, key: GroupKey, why: str, at: int) -> Any:
        """Return a span of an abort of a group that begins at `at`."""
        return self._tracer.start_span(
            "rankscope.abort",
            start_time=at,
            attributes={
                "rankscope.group": key.name,
                "rankscope.ranks": key.ranks,
                "rankscope.verdict": why,
            },
        )


def spans_if_installed(cluster: ObservedRanks) -> Spans | None:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return Spans(cluster, trace.get_tracer("rankscope", __version__))


def _not_completed(group: GroupStatus) -> OpStatus | None:
    """Return the op that a rank has not completed in a group that is aborted."""
    if group.state != "aborted":
        return None
    last, done = group.oldest or group.enqueued, group.completed
    if last is None or (done and (done.op, done.seq) == (last.op, last.seq)):
        return None
    return last


def _age(verdict: Verdict, status: ClusterStatus) -> int:
    """Return for how many ns the first of its ranks is in the op that hangs."""
    ages = [
        one.oldest.elapsed
        for rank in status.ranks
        for one in rank.groups
        if one.key == verdict.group
        and one.oldest is not None
        and one.oldest.seq == verdict.seq
        and one.oldest.elapsed is not None
    ]
    return int(max(ages, default=0.0) * 1e9)
