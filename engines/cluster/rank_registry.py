"""RankRegistry: the slots of ranks, their status, and how requests reach the ranks."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from ..status import Summary
from ..wire.answers import Answers
from ..wire.requests import EncodedSummary, GetSummary, Request
from ..wire.status_codec import decode
from .rank_slots import RankSlot

__all__ = ["RankRegistry"]

A = TypeVar("A")
OnStatus = Callable[[int, Summary], None]

_log = logging.getLogger(__name__)


class RankRegistry(ABC):
    """The ranks of engines, or of a script's job."""

    def __init__(self) -> None:
        self.slots: list[RankSlot] = []
        self._on_status: tuple[OnStatus, ...] = ()
        self._recording = threading.Lock()

    # -- requests ----------------------------------------------------------

    @abstractmethod
    def ask(
        self,
        request: Request[A] | Callable[[int], Request[A]],
        ranks: Iterable[int] | None = None,
        timeout: float = 2.0,
    ) -> Answers[A]:
        """Send a request to the living of `ranks`; wait for the answers."""

    @abstractmethod
    def post(
        self, request: Request[Any], ranks: Iterable[int] | None = None
    ) -> Mapping[int, Future[Any]]:
        """Send a request to the living of `ranks` without waiting."""

    # -- status ------------------------------------------------------------

    def subscribe(self, callback: OnStatus) -> Callable[[], None]:
        """Call ``callback(rank, summary)`` on each change; return a cancel function."""
        self._on_status = (*self._on_status, callback)

        def cancel() -> None:
            self._on_status = tuple(x for x in self._on_status if x is not callback)

        return cancel

    def refresh(self, older_than: float, timeout: float) -> None:
        """Request summaries of the ranks whose last one is `older_than` seconds old."""
        now = time.monotonic()
        stale = [
            slot.rank
            for slot in self.slots
            if slot.alive
            and (slot.summary_at is None or now - slot.summary_at > older_than)
        ]
        if stale:
            self._record_all(self.ask(GetSummary(), stale, timeout))

    def record_summary(self, rank: int, encoded: str | bytes) -> None:
        """Store a rank's summary and when it arrived, unless a newer one is there.

        A published summary may arrive after the answer to a later request, and an
        answer is stored by the thread that waited for it, at any time afterwards. That
        of an engine which was replaced meanwhile is dropped, too.
        """
        slot = self.slots[rank]
        try:
            summary = decode(encoded)
        except ValueError as error:
            with self._recording:
                slot.record(error)
            return
        with self._recording:
            if self._is_of(slot, summary) and summary.number >= slot.summary.number:
                slot.record(summary)

    def _is_of(self, slot: RankSlot, summary: Summary) -> bool:
        """Return whether the process that has the slot has made the summary."""
        return summary.pid == slot.pid

    def _record_all(self, answers: Answers[EncodedSummary]) -> None:
        for rank, encoded in answers.results.items():
            self.record_summary(rank, encoded)

    def _call_subscribers(self, slot: RankSlot) -> None:
        summary = slot.summary
        if slot.death is not None:
            summary = replace(summary, dead=slot.death)
        for callback in self._on_status:
            try:
                callback(slot.rank, summary)
            except Exception:  # noqa: BLE001 - code of a user
                # The thread that calls must go on: it serves every rank.
                _log.exception("a status callback failed")
