"""Sampling of ranks that are slow to begin."""

from __future__ import annotations

import threading
from typing import Any

from rankscope.backends.observe.stacks import ThreadStacks
from rankscope.engines.observe.profiling import Sampling
from rankscope.engines.observe.rank_registry import RankRegistry
from rankscope.engines.wire import requests
from rankscope.engines.wire.answers import Answers
from rankscope.engines.wire.rank_service import RankService

SECONDS = 0.2


class SlowToBegin(RankRegistry):
    """A registry of one rank, this process, that begins later than it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers = requests.handlers_of(RankService(lambda: "", ThreadStacks()))

    def ask(self, request: Any, ranks: Any = None, timeout: float = 2) -> Answers[Any]:
        if isinstance(request, requests.StartSampling):
            threading.Event().wait(SECONDS)
        content = request.content()
        return Answers({0: self._handlers[content["op"]](content["args"])})


def test_a_rank_that_begins_late_is_sampled_as_long_as_was_asked() -> None:
    profile = Sampling(SlowToBegin(), [0], SECONDS).wait()
    # The thread that samples gets going a moment after the answer.
    assert profile.seconds > SECONDS / 2
