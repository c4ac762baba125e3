"""What a click does on the kernel's side, without a page and without ranks."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from rankscope.widgets.board.actions import BoardActions
from rankscope.widgets.board.model import BoardModel
from tests.widgets.statuses import cluster, group, rank


class Asked:
    """A cluster that notes what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def restart(self, ranks: Any = None) -> None:
        self.calls.append(("restart", ranks))

    def rebuild(self, group: Any = None) -> list[str]:
        self.calls.append(("rebuild", group))
        return []


@pytest.mark.parametrize(
    ("dead", "frozen", "restarted"),
    [([1], [], [1]), ([], [2], [2]), ([3], [2], [2, 3])],
)
def test_a_restart_replaces_dead_and_frozen_ranks(
    dead: list[int], frozen: list[int], restarted: list[int]
) -> None:
    model = BoardModel.of(cluster(*(rank(number, group()) for number in range(4))))
    model.head |= {"dead": dead, "frozen": frozen}
    asked, answers = Asked(), queue.SimpleQueue[Any]()
    actions = BoardActions(
        asked,  # type: ignore[arg-type]
        diagnose=None,
        send=answers.put,
        get_model=lambda: model,
        show_verdicts=lambda verdicts: None,
        on_done=lambda: None,
        source_line=lambda cell, line: "",
    )
    actions.start({"do": "restart", "id": "1", "group": model.groups[0].id})
    answer = answers.get(timeout=30)
    assert answer["ok"]
    assert "restarted" in answer["text"]
    assert asked.calls == [("restart", restarted), ("rebuild", None)]
