"""A span for each hang and each abort, as an SDK's exporter gets them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rankscope.engines import ClusterStatus
from rankscope.engines.observe import spans as module
from rankscope.engines.observe.spans import Spans, spans_if_installed
from rankscope.engines.status import Summary
from tests.widgets import simulated, statuses


class Ranks:
    """A cluster with a status, which one of its ranks reports."""

    def __init__(self) -> None:
        self.now = statuses.cluster()
        self.callbacks: list[Callable[[int, Summary], None]] = []

    def glance(self) -> ClusterStatus:
        return self.now

    def subscribe(self, callback: Callable[[int, Summary], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return self.callbacks.clear

    def report(self, **fields: Any) -> None:
        group = replace(statuses.group(ranks=range(2)), **fields)
        for callback in self.callbacks:
            for rank in range(2):
                callback(rank, statuses.rank(rank, group))


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def made(exporter: InMemorySpanExporter) -> Iterator[tuple[Ranks, Spans]]:
    provider, ranks = TracerProvider(), Ranks()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(ranks, provider.get_tracer("test"))  # type: ignore[arg-type]
    yield ranks, spans
    spans.close()
    assert not ranks.callbacks
    assert not spans._thread.is_alive()


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_hang_is_a_span_from_its_first_rank_to_its_end(
    made: tuple[Ranks, Spans], exporter: InMemorySpanExporter
) -> None:
    ranks, spans = made
    (verdict, *_) = simulated.hang(4, 2)[1]
    oldest = statuses.op(seq=verdict.seq, state="started", elapsed=6.0)
    group = replace(
        statuses.group(verdict.group.name, verdict.group.ranks), oldest=oldest
    )
    ranks.now = statuses.cluster(statuses.rank(0, group))
    spans.note_verdicts([verdict])
    # What is known of it may change.
    spans.note_verdicts([replace(verdict, text="rank 2 is at data.py:77")])
    spans.note_verdicts([])
    spans.close()
    (found,) = exporter.get_finished_spans()
    assert found.name == "rankscope.stall"
    assert 6.0 <= seconds(found) < 60.0
    assert dict(found.attributes or {}) == {
        "rankscope.group": verdict.group.name,
        "rankscope.ranks": verdict.culprits,
        "rankscope.waiting": verdict.waiting,
        "rankscope.op": verdict.op,
        "rankscope.seq": verdict.seq,
        "rankscope.fault": verdict.fault.value,
        "rankscope.verdict": "rank 2 is at data.py:77",
        "rankscope.line": verdict.line,
    }


def test_an_abort_is_one_span_until_the_rebuild(
    made: tuple[Ranks, Spans], exporter: InMemorySpanExporter
) -> None:
    ranks, spans = made
    ranks.report()
    for _ in range(3):
        ranks.report(state="aborted", reason="a person has ended it")
    ranks.report(generation=1)
    ranks.report(generation=1, state="aborted", reason="again")
    spans.close()
    first, second = exporter.get_finished_spans()
    assert first.name == second.name == "rankscope.abort"
    assert dict(first.attributes or {}) == {
        "rankscope.group": "default",
        "rankscope.ranks": (0, 1),
        "rankscope.verdict": "a person has ended it",
    }
    assert dict(second.attributes or {})["rankscope.verdict"] == "again"


def test_an_abort_that_was_rebuilt_before_a_look_is_a_span(
    made: tuple[Ranks, Spans], exporter: InMemorySpanExporter
) -> None:
    ranks, spans = made
    # Those of before the first look are none.
    ranks.report(aborts=1, generation=1)
    ranks.report(aborts=2, generation=2)
    for _ in range(2):
        ranks.report(aborts=3, generation=2, state="aborted", reason="seen")
    ranks.report(aborts=3, generation=3)
    ranks.report(aborts=5, generation=4, state="aborted", reason="seen, too")
    # A fresh process of a rank counts anew.
    ranks.report(aborts=0, generation=5)
    ranks.report(aborts=0, generation=6)
    spans.close()
    found = exporter.get_finished_spans()
    why = [dict(one.attributes or {})["rankscope.verdict"] for one in found]
    assert why == [module.UNSEEN, "seen", module.UNSEEN, "seen, too"]
    assert all(seconds(one) >= 0 for one in found)


def test_an_abort_has_the_first_op_that_a_rank_has_not_completed(
    made: tuple[Ranks, Spans], exporter: InMemorySpanExporter
) -> None:
    ranks, spans = made
    aborted = {"state": "aborted", "reason": "x"}
    done, last = statuses.op("barrier", 13), statuses.op("all_reduce", 14)
    # A rank without an op is first, then one that is ahead, and one that is behind.
    ranks.report(**aborted, enqueued=done, completed=done)
    ranks.report(**aborted, enqueued=statuses.op("broadcast", 15), completed=done)
    ranks.report(**aborted, enqueued=last, completed=done)
    ranks.report(**aborted, enqueued=statuses.op("broadcast", 15), oldest=last)
    ranks.report(generation=1)
    ranks.report(generation=1, **aborted, enqueued=done, completed=done)
    spans.close()
    first, second = (
        dict(one.attributes or {}) for one in exporter.get_finished_spans()
    )
    assert (first["rankscope.op"], first["rankscope.seq"]) == ("all_reduce", 14)
    # Where none was in flight, none is named.
    assert "rankscope.op" not in second


def test_a_slow_exporter_delays_nobody_who_reports(
    made: tuple[Ranks, Spans],
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, spans = made
    export, may_go = exporter.export, threading.Event()

    def slowly(found: Any) -> Any:
        assert may_go.wait(30.0)
        return export(found)

    monkeypatch.setattr(exporter, "export", slowly)
    monkeypatch.setattr(module, "_END_WAIT", 30.0)
    for generation in range(4):
        ranks.report(generation=generation, state="aborted", reason="x")
    assert not exporter.get_finished_spans()
    may_go.set()
    spans.close()
    assert len(exporter.get_finished_spans()) == 4


def test_without_an_sdk_the_api_makes_spans_that_go_nowhere() -> None:
    spans = spans_if_installed(Ranks())  # type: ignore[arg-type]
    assert spans is not None
    spans.note_verdicts(simulated.hang(4, 2)[1])
    spans.close()
