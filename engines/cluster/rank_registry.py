"""RankRegistry: the slots of ranks, and how requests reach the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from ..wire.answers import Answers
from ..wire.requests import Request
from .rank_slots import RankSlot

__all__ = ["RankRegistry"]

A = TypeVar("A")


class RankRegistry(Protocol):
    """The ranks of engines, or of a script's job."""

    slots: list[RankSlot]

    def ask(
        self,
        request: Request[A] | Callable[[int], Request[A]],
        ranks: Iterable[int] | None = None,
        timeout: float = ...,
    ) -> Answers[A]:
        """Send a request to the living of `ranks`; wait for the answers."""

    def post(
        self, request: Request[Any], ranks: Iterable[int] | None = None
    ) -> Mapping[int, Future[Any]]:
        """Send a request to the living of `ranks` without waiting."""

    def refresh(self, older_than: float, timeout: float) -> None:
        """Request summaries of the ranks whose last one is `older_than` seconds old."""

    def record_summary(self, rank: int, summary: dict[str, Any]) -> None:
        """Store a rank's summary and when it arrived."""

    def subscribe(
        self, callback: Callable[[int, dict[str, Any]], None]
    ) -> Callable[[], None]:
        """Call ``callback(rank, summary)`` on each change; return a cancel function."""
