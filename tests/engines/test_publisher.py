"""To whom a rank publishes its status, and how often."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.engines.agent import publisher
from rankscope.engines.agent.publisher import (
    HEARTBEAT,
    LEASE,
    MIN_INTERVAL,
    StatusPublisher,
)
from rankscope.engines.cluster.registry import interval_of
from rankscope.engines.wire.requests import Subscribe, Unsubscribe
from rankscope.widgets.board.model import LATE
from rankscope.widgets.board.rows import SILENT


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(publisher, "time", found)
    return found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subscriptions that a status was published to."""
    found: list[str] = []

    def publish(kernel: Any, kind: str, content: Any, header: dict[str, Any]) -> None:
        found.append(header["msg_id"])

    monkeypatch.setattr(f"{publisher.__name__}.private.publish", publish)
    return found


@pytest.fixture
def published(clock: Clock) -> StatusPublisher:
    """A publisher whose thread is the test."""
    found = StatusPublisher.__new__(StatusPublisher)
    found._kernel, found.summary, found.subscriptions = None, lambda: "", {}
    return found


def subscribe(published: StatusPublisher, name: str, interval: float = 0.0) -> None:
    header = {"msg_id": name, "session": name}
    published._subscribe(Subscribe(header, interval))


def test_each_gets_it_as_often_as_it_wants(
    published: StatusPublisher, clock: Clock, sent: list[str]
) -> None:
    subscribe(published, "board")
    subscribe(published, "top", 1.0)
    for _ in range(20):
        published._publish(clock.now)
        clock.now += 0.125
    assert sent.count("board") == 20
    assert sent.count("top") == 3
    # A change is not forgotten: the thread looks again when it is the next one's turn.
    assert published._publish(clock.now) == clock.now + 0.5
    # A renewal does not send it earlier, and the last one waits for no turn.
    subscribe(published, "top", 1.0)
    published._publish(clock.now)
    assert sent.count("top") == 3
    published._publish(clock.now, last=[])
    assert sent.count("top") == 4


def test_many_ranks_send_less_often_and_none_counts_as_silent() -> None:
    assert interval_of(32) < MIN_INTERVAL
    assert interval_of(256) == pytest.approx(0.512)
    # A late message is no missing heartbeat.
    assert interval_of(1024) == HEARTBEAT < LATE < SILENT


def test_a_subscription_ends_by_itself_or_on_request(
    published: StatusPublisher, clock: Clock, sent: list[str]
) -> None:
    subscribe(published, "gone")
    subscribe(published, "left")
    assert published.is_watched_by("gone")
    published._unsubscribe(Unsubscribe("left"))
    assert not published.is_watched_by("left")
    clock.now += LEASE + 1
    published._publish(clock.now)
    assert sent == []
    assert published.subscriptions == {}
