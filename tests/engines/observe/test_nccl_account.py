"""What NCCL says itself, in the verdict on a hang."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.nccl import ras
from rankscope.engines.observe.nccl_account import account, account_of_group
from rankscope.engines.wire.requests import NcclReport
from tests.backends.nccl.ras_service import TEXT, missing, rank, report
from tests.widgets import statuses

#: Global ranks of a group, and their processes.
MEMBERS = {4: 100, 6: 101, 7: 102}


def communicators(*ranks: Any, lost: Any = ()) -> list[dict[str, Any]]:
    text = json.dumps(report(list(ranks), list(lost)))
    return [asdict(one) for one in ras.parse_report(text)]


def test_counts_and_a_rank_that_does_not_answer() -> None:
    found = communicators(
        rank(0, 100, 15),
        rank(1, 101, 14),
        lost=[missing(2, 102, unresponsive=True, dead=False)],
    )
    said = (
        "NCCL's own report (RAS): rank 7 does not answer NCCL, AllReduce launched 15 "
        "on rank 4, 14 on rank 6"
    )
    assert account(found, MEMBERS) == said
    # The text of an older service says the same.
    older = [asdict(one) for one in ras.parse_report(TEXT)]
    assert account(older, MEMBERS) == said


def test_ranks_that_agree() -> None:
    found = communicators(rank(0, 100, 3), rank(1, 101, 3), rank(2, 102, 3))
    assert account(found, MEMBERS) == (
        "NCCL's own report (RAS): every rank has launched AllReduce 3"
    )
    found = communicators(rank(0, 100, 0), rank(1, 101, 0), rank(2, 102, 0))
    assert account(found, MEMBERS).endswith("(RAS): no operation was launched")


def test_an_error_and_a_rank_that_left() -> None:
    found = communicators(
        rank(0, 100, 3),
        rank(1, 101, 3, async_error=6),
        lost=[missing(2, 102, unresponsive=False, dead=False)],
    )
    assert account(found, MEMBERS) == (
        "NCCL's own report (RAS): rank 6 reports 'Remote process error', rank 7 is not "
        "in the communicator any more"
    )


def test_most_ranks_are_not_named_in_a_text() -> None:
    outliers = ras.RasCommunicator(
        "ab", 3, (ras.RasRank(1, 101, "running", {"AllReduce": 0}),), {"AllReduce": 9}
    )
    assert account([asdict(outliers)], MEMBERS) == (
        "NCCL's own report (RAS): AllReduce launched 9 on ranks 4, 7, 0 on rank 6"
    )


@pytest.mark.parametrize(
    "ranks",
    [
        # Another job, another order, another size, and processes that are not known.
        [rank(0, 1, 1), rank(1, 2, 1), rank(2, 3, 1)],
        [rank(0, 101, 1), rank(1, 100, 1), rank(2, 102, 1)],
        [rank(0, 100, 1), rank(1, 101, 1)],
        [rank(0, -1, 1), rank(1, -1, 1), rank(2, -1, 1)],
        [],
    ],
)
def test_communicators_of_others(ranks: list[dict[str, Any]]) -> None:
    assert account(communicators(*ranks), MEMBERS) == ""


GROUP = GroupKey("default", (0, 1))


def ask_of(*reports: NcclReport | None) -> tuple[list[int], Any]:
    """The ranks that are asked, and a function that asks one: answers in turn."""
    asked: list[int] = []

    def ask(number: int) -> NcclReport | None:
        asked.append(number)
        return reports[min(len(asked), len(reports)) - 1]

    return asked, ask


def two(devices: dict[str, str], **first: Any) -> Any:
    one = statuses.group(ranks=(0, 1), devices=devices)
    return statuses.cluster(
        statuses.rank(0, one, pid=100, **first), statuses.rank(1, one, pid=101)
    )


NCCL = {"cuda": "nccl (device 0: running)"}
PENDING: NcclReport = {"pending": True, "error": "", "communicators": []}
DONE: NcclReport = {
    "pending": False,
    "error": "",
    "communicators": communicators(rank(0, 100, 2), rank(1, 101, 2)),
}


def test_a_report_that_is_under_way_is_waited_for() -> None:
    asked, ask = ask_of(PENDING, PENDING, DONE)
    said = account_of_group(GROUP, two(NCCL), ask, 30)
    assert said.endswith("every rank has launched AllReduce 2")
    assert asked == [0, 0, 0]
    asked, ask = ask_of(PENDING)
    assert account_of_group(GROUP, two(NCCL), ask, 0) == ""
    # The last report, while a new one is under way.
    asked, ask = ask_of({**DONE, "pending": True})
    assert account_of_group(GROUP, two(NCCL), ask, 0) == said


def test_who_is_asked() -> None:
    asked, ask = ask_of(DONE)
    assert account_of_group(GROUP, two(NCCL, state="unreachable"), ask, 0)
    assert asked == [1]
    asked, ask = ask_of(None)
    assert account_of_group(GROUP, two(NCCL), ask, 30) == ""
    for devices in ({"cpu": "tcp"}, {"cuda": "nccl (not built)"}):
        asked, ask = ask_of(DONE)
        assert account_of_group(GROUP, two(devices), ask, 0) == ""
        assert asked == []
