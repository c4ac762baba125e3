"""Which op of a group is overdue, or cannot end.

Where nobody looks at the job, a rank asks the others also while its op is young, 2, 4,
8, … s after it began: if they have issued different ops under its number, none of them
can end, and the group is aborted at once. All else goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from ..errors import DistTimeoutError
from ..work.work import Work
from .abort_reason import AbortReason, FoundCause
from .inquiry import Inquiry, Question
from .remedies import after_abort
from .spec import GroupSpec
from .unattended import is_attended, on_overdue

__all__ = ["Deadlines"]

#: Seconds after which the ranks are asked about an op for the first time.
EARLY = 2.0
#: Seconds that an abort waits for what is done `on_overdue`.
_OVERDUE_WAIT = 6.0


class Deadlines:
    """The deadlines of the ops in flight of one generation, for the watchdog."""

    def __init__(self, spec: GroupSpec, inquiry: Inquiry) -> None:
        self._spec, self._inquiry = spec, inquiry
        #: Why the ops hang, if a diagnosis over all ranks has found it.
        self.cause: FoundCause | None = None
        #: The Work that is past its deadline, while its group lives on.
        self.overdue: Work | None = None
        # The oldest Work in flight, when it began, and the age at which the ranks are
        # asked about it.
        self._oldest: Work | None = None
        self._begun_at = 0.0
        self._early = EARLY
        # What the ranks are asked about it, or about the overdue one.
        self._question: Question | None = None
        # What is done about the hang by others, and until when that may last.
        self._pending: tuple[list[threading.Event], float] | None = None

    def check(self, in_flight: Iterable[Work]) -> float:
        """Look for an `overdue` op; return the seconds to the next deadline."""
        oldest, about = self._oldest, self._about
        self.overdue = self._oldest = None
        nearest = float("inf")
        for place, work in enumerate(in_flight):
            record, begun_at = work.record, work.begun_at(oldest=not place)
            if record is None or begun_at is None:
                continue
            if self._oldest is None:
                self._oldest, self._begun_at = work, begun_at
            left = begun_at + record.timeout - time.monotonic()
            if left > 0:
                nearest = min(nearest, left)
            elif self.overdue is None and not work.poll():
                self.overdue = work
        if oldest is not self._oldest:
            self._early = EARLY
        if about is not self._about:
            # The op has ended after all: what was found does not hold any more.
            self._question = self._pending = None
        return nearest

    @property
    def _about(self) -> Work | None:
        """The Work about which the ranks are asked."""
        return self._oldest if self.overdue is None else self.overdue

    def asked(self) -> bool:
        """Ask the ranks why the op is `overdue`; return whether they have answered.

        Never blocks. True also where no answer is to be expected any more, and where
        a diagnosis has found the cause. So do those who hear of the op `on_overdue`.
        """
        heard = self._are_heard()
        if self._diagnosed() is not None:
            return heard
        self._question = self._question or self._inquiry.ask()
        return self._question.is_over and heard

    def mismatch(self) -> AbortReason | None:
        """Return why the oldest op cannot end, where ranks have issued other ops.

        Asks them from time to time; never blocks. Of those who ask at once, one has the
        reason. Where somebody looks at the job, that one ends it.
        """
        oldest, question = self._oldest, self._question
        if oldest is None:
            return None
        if question is None:
            age = time.monotonic() - self._begun_at
            if age >= self._early and not is_attended() and not oldest.poll():
                self._early = 2 * age
                self._question = self._inquiry.ask()
            return None
        if not question.is_over:
            return None
        found = question.found
        if found is None or not found.final or not question.is_own:
            self._question = None
            return None
        if not self._are_heard():
            return None
        return self._reason(found.text, found.culprits)

    def _are_heard(self) -> bool:
        """Tell those who hear of a hang; return whether they have done their part."""
        if self._pending is None:
            heard = [hear() for hear in on_overdue]
            self._pending = heard, time.monotonic() + _OVERDUE_WAIT
        heard, deadline = self._pending
        return all(one.is_set() for one in heard) or time.monotonic() > deadline

    def _diagnosed(self) -> FoundCause | None:
        """Return what a diagnosis has found since the overdue op began."""
        cause, overdue = self.cause, self.overdue
        if cause is None or overdue is None or cause.at <= overdue.since:
            return None
        return cause

    def _found(self) -> tuple[str, tuple[int, ...]]:
        """Return why the overdue op did not end, ``""`` if it is not known, and who."""
        cause = self._diagnosed()
        found = None if self._question is None else self._question.found
        if cause is not None:
            return str(cause), tuple(cause.culprits)
        if found is not None:
            return found.text, found.culprits
        return "", ()

    def reason(self) -> AbortReason:
        """Return why the group ends for the `overdue` op."""
        assert self.overdue is not None
        record = self.overdue.record
        assert record is not None
        found, culprits = self._found()
        text = f"{record.describe()} timed out after {record.timeout:g} s"
        return self._reason(text, culprits, found)

    def _reason(
        self, text: str, culprits: tuple[int, ...], diagnosis: str = ""
    ) -> AbortReason:
        me = f"rank {self._spec.global_rank}"
        return AbortReason(text, me, culprits=culprits, diagnosis=diagnosis)

    def error(self, work: Work, reason: AbortReason) -> DistTimeoutError:
        """Return the error of `work`, which was overdue when its group was aborted."""
        record = work.record
        assert record is not None
        timeout = record.timeout
        found, _ = self._found()
        # Another rank may have asked, and aborted, before this one had the answer.
        found = found or reason.diagnosis
        whose = "the group's" if timeout == self._spec.timeout else "its own"
        why = "not every rank entered it, or one is stuck"
        if found:
            why = found
        elif reason.by != f"rank {self._spec.global_rank}":
            # Another rank, or a person, was faster.
            why = str(reason)
        return DistTimeoutError(
            f"{work.describe()} was not done {timeout:g} s after it began "
            f"({whose} timeout): {why}. The group was aborted; {after_abort()}",
            **work.identity(),
            culprits=reason.culprits,
            reason=f"not done {timeout:g} s after it began",
        )
