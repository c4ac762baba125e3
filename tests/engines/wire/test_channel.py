"""The errors of ranks that did not answer a request, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from rankscope.engines import ClusterError
from rankscope.engines.wire import answers
from rankscope.engines.wire.answers import Answers, _format_error, wait_for_answers


@pytest.mark.parametrize(
    ("errors", "reported"),
    [
        ({1: "no answer within 2 s"}, "rank 1: no answer within 2 s"),
        ({1: "broken", 0: "broken"}, "ranks 0–1: broken"),
        ({0: "broken", 1: "dead"}, "rank 0: broken; rank 1: dead"),
        (
            {0: "send on rank 0: broken", 1: "send on rank 1: broken"},
            "ranks 0–1: send: broken",
        ),
    ],
)
def test_each_cause_is_reported_once(errors: dict[int, str], reported: str) -> None:
    with pytest.raises(ClusterError, match=f"^{re.escape(reported)}$"):
        Answers(errors=errors).all()


@pytest.mark.parametrize(
    ("ename", "evalue", "reported"),
    [
        ("ClusterError", "no GPU: get one", "no GPU: get one"),
        ("DistBackendError", "no NCCL", "no NCCL"),
        ("KeyError", "'x'", "KeyError: 'x'"),
        ("DistError", "", "DistError: "),
    ],
)
def test_errors_of_rankscope_have_no_class_name(
    ename: str, evalue: str, reported: str
) -> None:
    assert _format_error(ename, evalue) == reported


def waiting(
    monkeypatch: pytest.MonkeyPatch, count: int, arrivals: list[int]
) -> Callable[[], tuple[float, list[float]]]:
    """Return a wait of 2 s for `count` ranks; `arrivals` of them answer in a turn."""
    futures: list[Future[Any]] = [Future() for _ in range(count)]
    waited: list[float] = []

    def wait(
        pending: set[Future[Any]], timeout: float
    ) -> tuple[set[Future[Any]], set[Future[Any]]]:
        waited.append(timeout)
        done = set(list(pending)[: arrivals.pop(0)])
        return done, pending - done

    monkeypatch.setattr(answers, "wait", wait)
    return lambda: (wait_for_answers(futures, 2.0), waited)


@pytest.mark.parametrize(
    ("count", "arrivals", "turns"),
    [
        # A few ranks have the time that was given, whether they answer or not.
        (4, [4], 1),
        (8, [7], 1),
        (8, [0], 1),
        # Many have more of it while answers arrive,
        (64, [20, 20, 24], 3),
        # until one turn brings none,
        (64, [63, 0], 2),
        # but the first, on a busy machine,
        (64, [0, 40, 24], 3),
        (64, [0, 0], 2),
        # and no more than in proportion to their number.
        (16, [5, 5], 2),
    ],
)
def test_many_ranks_have_more_time_to_answer_while_answers_arrive(
    monkeypatch: pytest.MonkeyPatch, count: int, arrivals: list[int], turns: int
) -> None:
    allowed, waited = waiting(monkeypatch, count, arrivals)()
    assert waited == [2.0] * turns
    assert allowed == 2.0 * turns


def test_who_does_not_answer_is_told_with_its_place() -> None:
    futures: dict[int, Future[Any]] = {rank: Future() for rank in range(3)}
    places = {0: None, 1: " (on b)", 2: " (on b)"}
    found = Answers.wait(futures, 0.001234, lambda rank, late: places[rank])
    assert found.errors == {
        0: "no answer within 0.00123 s",
        1: "no answer within 0.00123 s (on b)",
        2: "no answer within 0.00123 s (on b)",
    }
