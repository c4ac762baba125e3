"""Requests for stacks, as a rank serves them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.errors import DistError
from rankscope.backends.observe.stacks import ThreadStacks
from rankscope.engines import ClusterError
from rankscope.engines.wire import requests
from rankscope.engines.wire.rank_service import MOST, RankService

WAIT = 60


class Served:
    """A service, asked as from a notebook: requests and answers are JSON."""

    def __init__(self) -> None:
        self._handlers = requests.handlers_of(
            RankService(lambda: "", ThreadStacks(), lambda: "train.py:7")
        )
        self.keys: set[str] = set()

    def __call__(self, request: requests.Request[Any]) -> Any:
        content = json.loads(json.dumps(request.content()))
        answer = self._handlers[content["op"]](content["args"])
        return json.loads(json.dumps(answer))

    def start(self, key: str, seconds: float = 60.0) -> None:
        self(requests.StartSampling(key, seconds, 100.0, False))
        self.keys.add(key)

    def take(self, key: str) -> Any:
        self.keys.discard(key)
        return self(requests.TakeSamples(key))


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    for key in list(found.keys):
        found.take(key)


def test_stacks_of_now(served: Served) -> None:
    answer = served(requests.GetStacks(every=False))
    assert answer["location"] == "train.py:7"
    thread, frames = answer["stacks"][0]
    assert thread == "MainThread"
    assert frames[-1][3]


def test_the_exception_that_the_main_thread_handles(served: Served) -> None:
    try:
        raise ValueError("no data\nmore")
    except ValueError:
        text, line = served(requests.GetStacks(every=False))["exception"]
    assert text == "ValueError: no data"
    assert line.startswith("test_rank_service.py:")
    try:
        raise DistError("an op failed because of another rank")
    except DistError:
        assert not any(served(requests.GetStacks(every=False))["exception"])
    assert not any(served(requests.GetStacks(every=False))["exception"])


def test_samples_are_taken_once(served: Served) -> None:
    served.start("a")
    # However soon that is.
    assert served.take("a")["looks"] > 0
    with pytest.raises(ClusterError, match="has no such profile"):
        served.take("a")


def test_each_frame_is_sent_once(served: Served) -> None:
    served.start("a", 0.1)
    answer = served.take("a")
    frames = [tuple(one) for one in answer["frames"]]
    assert len(set(frames)) == len(frames)
    for _, places, seconds in answer["stacks"]:
        assert all(place < len(frames) for place in places)
        assert seconds > 0


def test_there_is_a_limit_which_those_that_ended_do_not_count_for(
    served: Served,
) -> None:
    for number in range(MOST):
        served.start(f"{number}", 60.0 if number else 0.01)

    def accepted() -> bool:
        try:
            served.start("more")
        except ClusterError:
            return False
        return True

    # Number 0 ends, and nobody takes it.
    until(accepted, WAIT, "a place")
    served.keys.discard("0")
    with pytest.raises(ClusterError, match="profiles are being taken"):
        served.start("too many")
