"""When the ranks are asked about an op, and which answers end its group."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

import rankscope as dist
from rankscope.backends.groups import deadlines, unattended
from rankscope.backends.groups.config import BackendConfig
from rankscope.backends.groups.deadlines import EARLY, Deadlines
from rankscope.backends.groups.inquiry import Explanation, Inquiry, Question
from rankscope.backends.groups.spec import GroupSpec

DIFFER = Explanation("rank 0 issued all_reduce", (0,), final=True)


class Asked:
    """An `Inquiry` that a test answers."""

    def __init__(self) -> None:
        self.questions: list[Question] = []

    def ask(self) -> Question:
        self.questions.append(Question(dist.HashStore()))
        return self.questions[-1]

    def answer(self, found: Explanation | None, *, own: bool = True) -> None:
        last = self.questions[-1]
        last.is_own = own
        last.end(found)


class InFlight:
    """A Work that is in flight since it was made, `age` seconds ago."""

    def __init__(self, timeout: float = 3600) -> None:
        self.record = SimpleNamespace(timeout=timeout, describe=lambda: "all_reduce #1")
        self.age = 0.0
        self.ended = False

    @property
    def since(self) -> float:
        return time.monotonic() - self.age

    def begun_at(self, oldest: bool) -> float:
        return self.since

    def poll(self) -> bool:
        return self.ended


class Watched:
    """Deadlines as the watchdog looks at them."""

    def __init__(self) -> None:
        self.inquiry = Asked()
        spec = GroupSpec("default", range(2), 0, BackendConfig("cpu:tcp"), 3600)
        self.deadlines = Deadlines(spec, cast(Inquiry, self.inquiry))

    def look(self, *works: InFlight) -> Any:
        self.deadlines.check(cast(Any, works))
        return self.deadlines.mismatch()

    @property
    def count(self) -> int:
        return len(self.inquiry.questions)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(unattended, "attendance", [])
    monkeypatch.setattr(deadlines, "on_overdue", [])
    return Watched()


def test_the_ranks_are_asked_ever_more_seldom(watched: Watched) -> None:
    work, ages = InFlight(), []
    for age in range(0, 3600):
        work.age = age
        before = watched.count
        assert watched.look(work) is None
        if watched.count > before:
            ages.append(age)
            watched.inquiry.answer(None)
    assert ages[0] == EARLY
    assert all(later >= 2 * age for age, later in pairwise(ages))
    assert len(ages) <= 11


def test_each_op_begins_anew(watched: Watched) -> None:
    for count in range(1, 4):
        work = InFlight()
        work.age = EARLY + 1
        watched.look(work)
        assert watched.count == count
        # Another one was the oldest before: what is answered now is not about this one.
        watched.inquiry.answer(DIFFER)


def test_what_can_never_end_is_the_reason_of_an_abort(watched: Watched) -> None:
    work = InFlight()
    work.age = EARLY + 1
    assert watched.look(work) is None
    assert watched.look(work) is None
    watched.inquiry.answer(DIFFER)
    reason = watched.look(work)
    assert (reason.text, reason.by) == (DIFFER.text, "rank 0")
    assert reason.culprits == DIFFER.culprits


@pytest.mark.parametrize(
    ("found", "own"),
    [
        (Explanation("rank 1 has not entered", (1,)), True),
        (DIFFER, False),
        (None, True),
    ],
)
def test_nothing_else_is(
    watched: Watched, found: Explanation | None, own: bool
) -> None:
    """Of ranks that ask at once, the one whose question it is acts."""
    work = InFlight()
    work.age = EARLY + 1
    watched.look(work)
    watched.inquiry.answer(found, own=own)
    assert watched.look(work) is None
    assert watched.look(work) is None
    assert watched.count == 1


def test_nobody_is_asked_while_somebody_looks(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = True
    monkeypatch.setattr(unattended, "attendance", [lambda: looks])
    work = InFlight()
    work.age = EARLY + 1
    watched.look(work)
    assert watched.count == 0
    looks = False
    watched.look(work)
    assert watched.count == 1


def test_an_op_that_has_just_ended_is_none_to_ask_about(watched: Watched) -> None:
    work = InFlight()
    work.age, work.ended = EARLY + 1, True
    watched.look(work)
    assert watched.count == 0


def test_the_abort_waits_for_the_report(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    monkeypatch.setattr(deadlines, "on_overdue", [lambda: written])
    work = InFlight()
    work.age = EARLY + 1
    watched.look(work)
    watched.inquiry.answer(DIFFER)
    assert watched.look(work) is None
    written.set()
    assert watched.look(work) is not None


def test_an_op_that_times_out_meanwhile_has_the_same_question(watched: Watched) -> None:
    work = InFlight(timeout=EARLY + 2)
    work.age = EARLY + 1
    watched.look(work)
    work.age = EARLY + 3
    watched.deadlines.check(cast(Any, [work]))
    assert watched.deadlines.overdue is cast(Any, work)
    assert not watched.deadlines.asked()
    watched.inquiry.answer(Explanation("rank 1 has not entered", (1,)))
    assert watched.deadlines.asked()
    assert watched.count == 1
    reason = watched.deadlines.reason()
    assert (reason.diagnosis, reason.culprits) == ("rank 1 has not entered", (1,))
    assert reason.text.endswith(f"timed out after {EARLY + 2:g} s")
