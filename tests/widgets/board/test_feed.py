"""When the board's feed reports the state for a saved notebook: with no process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import ClusterError, ClusterStatus, ObservedRanks
from rankscope.engines.status import Summary
from rankscope.widgets.board import feed as of_feed
from rankscope.widgets.board.feed import BoardFeed
from rankscope.widgets.board.model import Message
from tests.widgets import simulated, statuses


class _Ranks:
    """A cluster whose status a test sets."""

    n, closed, detached, ended = 4, False, False, None

    def __init__(self) -> None:
        self.known = statuses.cluster()
        #: What they say if they are asked.
        self.answer: ClusterStatus | None = None
        self.callback: Callable[[int, Summary], None] = lambda rank, summary: None

    def glance(self, ranks: Iterable[int] | None = None) -> ClusterStatus:
        return self.known

    def status(self, *, fresh: bool = False, timeout: float = 0.0) -> ClusterStatus:
        if fresh:
            self.known = self.answer or self.known
        return self.known

    def subscribe(self, callback: Callable[[int, Summary], None]) -> Callable[[], None]:
        self.callback = callback
        return lambda: None

    def take(self, **fields: Any) -> None:
        """Let all ranks report a state."""
        group = statuses.group(**fields.pop("group", {}))
        self.known = statuses.cluster(
            *(statuses.rank(n, group, **fields) for n in range(4))
        )
        for number in range(4):
            self.callback(number, cast(Summary, None))


class _Saved:
    """The feed, and what the outputs have of it."""

    def __init__(self) -> None:
        self.ranks = _Ranks()
        self.ranks.take()
        self.reports: list[str] = []
        self.feed = BoardFeed(
            cast(ObservedRanks, self.ranks), lambda message: None, self._report
        )
        self.feed._late.look = lambda issued, now: None  # type: ignore[method-assign]
        self.feed.watch("page")

    def _report(self) -> None:
        (group,) = self.feed.model.groups
        row = group.row(0)
        title = self.feed.model.banner().title
        self.reports.append(f"{title} {row['op']} {row['seq']}")

    def shows(self, key: str, text: str) -> bool:
        """Whether the board shows this in a cell of rank 0."""
        return self.feed.model.groups[0].row(0).get(key) == text

    def has(self, report: str) -> None:
        until(lambda: self.reports[-1:] == [report], 60, report)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Saved]:
    # It would rest for seconds on a machine that is busy.
    monkeypatch.setattr(of_feed, "REST_FACTOR", 0.0)
    # Only what does not wait for these is reported.
    monkeypatch.setattr(of_feed, "SETTLED", 1000.0)
    monkeypatch.setattr(of_feed, "NEVER_SETTLED", 1000.0)
    monkeypatch.setattr(of_feed, "FULL_REFRESH", 1000.0)
    found = _Saved()
    yield found
    found.feed.close()


def test_a_cell_that_ends_is_reported_and_one_that_runs_is_not(saved: _Saved) -> None:
    saved.ranks.take(state="busy", cell=7)
    until(lambda: saved.feed.model.banner().title == "Running", 60)
    saved.ranks.take(group={"completed": simulated.op(15)})
    saved.has("Idle all_reduce #15")
    assert not any("Running" in one for one in saved.reports)


def test_a_cell_that_is_over_between_two_looks_is_reported(saved: _Saved) -> None:
    for seq in (15, 16):
        saved.feed.report_end()
        saved.ranks.take(group={"completed": simulated.op(seq)})
        saved.has(f"Idle all_reduce #{seq}")


def test_the_end_of_a_cell_is_reported_at_once_where_no_page_shows_it() -> None:
    ranks, reports = _Ranks(), []
    ranks.take(state="busy", cell=7)
    feed = BoardFeed(
        cast(ObservedRanks, ranks),
        lambda message: None,
        lambda: reports.append(feed.model.banner().title),
    )
    feed.refresh()
    # Nothing is published before the next cell, or the kernel's end, comes.
    ranks.answer = statuses.cluster(*(statuses.rank(n) for n in range(4)))
    feed.report_end()
    assert reports == ["Idle"]
    # Of a cell that has left the ranks alone the outputs have the state already.
    feed.report_end()
    assert reports == ["Idle"]
    assert not feed.running


def test_a_hang_and_its_end_are_reported(saved: _Saved) -> None:
    status, verdicts = simulated.hang(4, 2)
    saved.ranks.known = status
    saved.feed.show_verdicts(verdicts)
    saved.ranks.callback(0, cast(Summary, None))
    saved.has("Missing ranks all_reduce #14")
    saved.ranks.take(group={"state": "aborted", "reason": "enough"})
    saved.has("Aborted all_reduce #14")


def test_a_cluster_that_ends_as_a_page_opens_is_shown_as_ended() -> None:
    ranks, sent = _Ranks(), list[Message]()

    def refuse(callback: Callable[[int, Summary], None]) -> Callable[[], None]:
        ranks.closed = True
        raise ClusterError("this cluster is shut down")

    ranks.subscribe = refuse  # type: ignore[method-assign]
    feed = BoardFeed(cast(ObservedRanks, ranks), sent.append, lambda: None)
    feed.watch("page")
    until(lambda: not feed.running, 60, "the thread's end")
    assert sent[-1]["banner"]["title"] == "Ended"


def test_what_changes_at_rest_is_not_reported_again_and_again(saved: _Saved) -> None:
    saved.ranks.take(group={"completed": simulated.op(15)})
    saved.has("Idle all_reduce #15")
    for number in (1, 2, 3):
        saved.ranks.take(group={"completed": simulated.op(15)}, memory=number << 20)
        until(partial(saved.shows, "memory", f"{number} MiB"), 60)
    saved.ranks.take(state="busy", cell=7)
    until(lambda: saved.feed.model.banner().title == "Running", 60)
    assert len(saved.reports) == 1


def test_pages_get_beats_however_long_an_update_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 1,024 ranks on a busy machine one takes 0.3 s, and a page waits for 10 s."""
    monkeypatch.setattr(of_feed, "REST_FACTOR", 1e9)
    monkeypatch.setattr(of_feed, "LONGEST_REST", 0.01)
    monkeypatch.setattr(of_feed, "BEAT", 0.0)
    sent: list[str] = []
    ranks = _Ranks()
    feed = BoardFeed(
        cast(ObservedRanks, ranks),
        lambda message: sent.append(message["type"]),
        lambda: None,
    )
    feed.watch("page")
    try:
        until(
            lambda: ranks.callback(0, cast(Summary, None)) or sent.count("beat") > 2,
            60,
        )
    finally:
        feed.close()
