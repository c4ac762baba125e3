"""The status of a rank that arrives after a newer one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from rankscope.backends import TCPStore
from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
from rankscope.engines.cluster.job_registry import JobRegistry
from rankscope.engines.observe.rank_registry import RankRegistry
from rankscope.engines.observe.rank_slots import RankSlot
from rankscope.engines.status import Summary, decode, encode
from rankscope.engines.wire.answers import Answers
from rankscope.engines.wire.job_channel import QueueReader, end_key, status_key
from rankscope.engines.wire.requests import GetSummary, PublishStatus, Request


class Ranks(RankRegistry):
    """One rank, in the process `pid`; what it answers arrives with `answer`."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = ""
        self.replace(100)

    def replace(self, pid: int) -> None:
        """Give the rank a new engine."""
        self.slots = [RankSlot(0, pid, str(pid), pid, "node1", "10.0.0.1", 29500)]

    def ask(self, request: Any, ranks: Any = None, timeout: float = 0) -> Answers[Any]:
        """Return the answer of the rank."""
        return Answers({0: self.answer})

    def post(self, request: Request[Any], ranks: Any = None) -> dict[int, Future[Any]]:
        """Refuse, as nothing here posts a request."""
        raise AssertionError(request)

    @property
    def line(self) -> str:
        """The line that is shown."""
        return self.slots[0].status(0.0).line


def status(number: int, line: str, pid: int = 100, host: str = "") -> str:
    return encode(Summary(number, pid=pid, host=host, line=line, busy=True))


@pytest.fixture
def ranks() -> Ranks:
    """A rank that has sent nothing."""
    return Ranks()


def test_one_that_was_on_its_way_does_not_replace_an_answer(ranks: Ranks) -> None:
    ranks.answer = status(2, "line 2")
    ranks.refresh(0.0, 1.0)
    arrived = ranks.slots[0].summary_at
    ranks.record_summary(0, status(1, "line 1"))
    assert (ranks.line, ranks.slots[0].summary_at) == ("line 2", arrived)
    ranks.record_summary(0, status(3, "line 3"))
    assert ranks.line == "line 3"


def test_an_answer_that_was_waited_for_does_not_replace_what_came_since(
    ranks: Ranks,
) -> None:
    ranks.record_summary(0, status(3, "line 3"))
    ranks.answer = status(2, "line 2")
    ranks.refresh(0.0, 1.0)
    assert ranks.line == "line 3"


def test_a_new_engine_begins_anew(ranks: Ranks) -> None:
    ranks.record_summary(0, status(500, "before"))
    ranks.replace(200)
    # The one before has answered, and the thread that asked stores it now.
    ranks.record_summary(0, status(501, "before"))
    assert ranks.slots[0].summary_at is None
    ranks.record_summary(0, status(1, "after", pid=200))
    assert ranks.line == "after"
    ranks.record_summary(0, status(502, "before"))
    assert ranks.line == "after"


def test_what_a_script_published_long_ago_does_not_replace_an_answer() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=60, key=b"k")
    job, called = JobRegistry(store, 1), threading.Event()
    try:
        job.record_summary(0, status(2, "line 2", host="node1"))
        job.subscribe(lambda rank, summary: called.set())
        store.set(status_key(0), status(1, "line 1", host="node1"))
        assert called.wait(60)
        assert job.slots[0].status(0.0).line == "line 2"
    finally:
        job.close()


def is_shown(slot: RankSlot, pid: int) -> bool:
    return slot.alive and slot.status(0.0).line == f"line {pid}"


def test_a_process_that_replaces_a_dead_one_of_a_script_is_shown() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=60, key=b"k")
    job, asked = JobRegistry(store, 1), queue.SimpleQueue[bytes]()
    (slot,) = job.slots
    try:
        QueueReader(store, "request/0", asked.put)
        for pid in (100, 200, 300):
            store.set(status_key(0), status(7 if pid == 100 else 1, f"line {pid}", pid))
            until(partial(is_shown, slot, pid))
            if pid > 100:
                # It publishes its status from now on.
                assert PublishStatus.__name__.encode() in asked.get(timeout=60)
            store.set(end_key(0), f"rank 0 is dead (pid {pid})")
            until(lambda: not slot.alive)
            # A last status of the dead process.
            store.set(status_key(0), status(8, "late", pid))
            assert f"(pid {pid})" in str(slot.status(0.0).reason)
            store.delete_key(end_key(0))
    finally:
        job.close()


def test_one_that_cannot_be_read_is_named_until_the_next(ranks: Ranks) -> None:
    ranks.record_summary(0, status(3, "line 3"))
    ranks.record_summary(0, '{"line": 7}')
    found = ranks.slots[0].status(0.0)
    assert found.reason == (
        "its status cannot be read (Expected `str`, got `int` - at `$.line`)"
    )
    assert found.line == ""
    ranks.record_summary(0, status(2, "line 2"))
    assert ranks.slots[0].unreadable
    ranks.record_summary(0, status(4, "line 4"))
    assert (ranks.line, ranks.slots[0].status(0.0).reason) == ("line 4", None)


@pytest.fixture(scope="module")
def one(_module_leaves_nothing: None) -> Iterator[Cluster]:
    with Cluster.start(1) as started:
        yield started


@pytest.mark.processes
def test_an_engine_numbers_what_it_sends(one: Cluster) -> None:
    registry, seen = one._registry, list[int]()
    (slot,) = registry.slots
    before = registry.ask(GetSummary()).all()[0]
    newer = one.status(fresh=True).ranks[0].number
    assert newer > decode(before).number > 0
    cancel = one.subscribe(lambda _, summary: seen.append(summary.number))
    try:
        registry._on_status_message(
            {"metadata": {"engine": slot.uuid}, "content": {"summary": before}}
        )
    finally:
        cancel()
    # The subscribers are called all the same: no answer reaches them.
    assert seen
    assert min(seen) >= newer
    assert slot.summary.number >= newer
