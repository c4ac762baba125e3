"""RankRegistry: the slots of ranks, their status, and how requests reach the ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from ..status import Summary, decode
from ..wire.answers import Answers
from ..wire.requests import EncodedSummary, GetSummary, Request
from .rank_slots import RankSlot

__all__ = ["RankRegistry"]

A = TypeVar("A")
OnStatus = Callable[[int, Summary], None]

_log = logging.getLogger(__name__)


class RankRegistry:
    """The ranks of engines, or of a script's job."""

    def __init__(self) -> None:
        self.slots: list[RankSlot] = []
        self._on_status: tuple[OnStatus, ...] = ()
        self._recording = threading.Lock()

    # -- requests ----------------------------------------------------------

    def ask(
        self,
        request: Request[A] | Callable[[int], Request[A]],
        ranks: Iterable[int] | None = None,
        timeout: float = 2.0,
    ) -> Answers[A]:
        """Send a request, one for all or one each, to the living of `ranks`."""
        if threading.current_thread() is self._receiver:
            raise RuntimeError("the I/O thread cannot wait for answers")
        slots = {slot.rank: slot for slot in self._living(ranks)}
        futures = {
            rank: self._post(slot, request(rank) if callable(request) else request)
            for rank, slot in slots.items()
        }

        def give_up(rank: int, late: Future[Any]) -> str:
            slot = slots[rank]
            self._give_up(slot, late)
            return "" if slot.is_here else f" (on {slot.host})"

        return Answers.wait(futures, timeout, give_up)

    def post(
        self, request: Request[Any], ranks: Iterable[int] | None = None
    ) -> dict[int, Future[Any]]:
        return {slot.rank: self._post(slot, request) for slot in self._living(ranks)}

    def _living(self, ranks: Iterable[int] | None) -> list[RankSlot]:
        chosen = None if ranks is None else set(ranks)
        return [
            slot
            for slot in self.slots
            if slot.alive and (chosen is None or slot.rank in chosen)
        ]

    def deaths(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return rank → why it is dead, for the dead of `ranks`."""
        chosen = set(ranks)
        return {
            slot.rank: slot.reason
            for slot in self.slots
            if slot.reason is not None and slot.rank in chosen
        }

    @property
    def _receiver(self) -> threading.Thread | None:
        """The thread that receives the answers, where it is known."""
        return None

    def _post(self, slot: RankSlot, request: Request[Any]) -> Future[Any]:
        raise NotImplementedError

    def _give_up(self, slot: RankSlot, future: Future[Any]) -> None:
        """Expect this answer no more."""
        raise NotImplementedError

    # -- status ------------------------------------------------------------

    def subscribe(self, callback: OnStatus) -> Callable[[], None]:
        """Call ``callback(rank, summary)`` on each change; return a cancel function."""
        self._on_status = (*self._on_status, callback)

        def cancel() -> None:
            self._on_status = tuple(x for x in self._on_status if x is not callback)

        return cancel

    def follow(self, interval: float) -> None:
        """Have the ranks send their status, if they do not; see `ObservedRanks`."""

    def refresh(
        self, older_than: float, timeout: float, also: Collection[int] = ()
    ) -> None:
        """Request the summaries that are `older_than` seconds old, and of `also`."""
        stale = [
            slot.rank
            for slot in self._living(None)
            if slot.rank in also or slot.is_silent(older_than)
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
            summary = replace(summary, dead=str(slot.reason))
        for callback in self._on_status:
            try:
                callback(slot.rank, summary)
            except Exception:  # noqa: BLE001 - code of a user
                # The thread that calls must go on: it serves every rank.
                _log.exception("a status callback failed")
