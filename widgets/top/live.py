"""Live: what keeps the board of an attached cluster or job up to date."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankscope.engines import StallWatch
from rankscope.engines.observe.diagnosing import STATUS_INTERVAL

from ..board.actions import BoardActions
from ..board.feed import BoardFeed
from ..board.model import Message

if TYPE_CHECKING:
    from rankscope.engines import Cluster, Job

__all__ = ["BY", "Live"]

#: The author of an abort, as the errors on the ranks show it.
BY = "a terminal"


class Live:
    """The feed of a board, its actions, and the watch for ops that hang.

    ``show(state)`` gets the whole state at most every `interval` seconds, and
    ``answer(message)`` the outcome of a request, both on threads of their own.
    """

    def __init__(
        self,
        cluster: Cluster | Job,
        show: Callable[[Message], None],
        answer: Callable[[Message], None],
        interval: float,
    ) -> None:
        self._show, self._answer = show, answer
        # Its viewer is here: it is never taken for one that is gone.
        self._feed = BoardFeed(
            cluster, self._take, lambda: None, lambda: True, interval
        )
        self._actions = BoardActions(
            cluster,
            diagnose=cluster.diagnose,
            send=self._take,
            get_model=lambda: self._feed.model,
            show_verdicts=self._feed.show_verdicts,
            on_done=self._feed.refresh_soon,
            source_line=lambda cell, line: "",
            by=BY,
        )
        # The ranks hear of verdicts from their notebook: this one is a guest.
        self._stalls = StallWatch(cluster, self._feed.show_verdicts, tells=False)
        cluster.follow(STATUS_INTERVAL)
        self._feed.watch(BY)

    def request(self, what: str, **parameters: Any) -> None:
        """Do what a button of the board does; the outcome follows."""
        self._actions.start({"do": what, "id": what, **parameters})

    def close(self) -> None:
        self._stalls.close()
        self._feed.close()

    def _take(self, message: Message) -> None:
        if message["type"] == "did":
            self._answer(message)
        elif message["type"] in ("full", "delta"):
            # The feed holds the model while it sends.
            self._show(self._feed.model.sent())
