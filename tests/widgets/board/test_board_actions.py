"""What a click does on the kernel's side, without a page and without ranks."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import pytest

from rankscope.backends.observe.stacks import MAIN, Frame, Stack
from rankscope.backends.observe.verdicts import Verdict
from rankscope.engines import Profile, RankStacks
from rankscope.engines.observe.profiling import Sampled
from rankscope.widgets.board import actions as board_actions
from rankscope.widgets.board.actions import BoardActions
from rankscope.widgets.board.model import BoardModel
from tests.widgets import simulated
from tests.widgets.statuses import cluster, group, rank


class Asked:
    """A cluster that notes what it is asked to do; its ranks compute `line`."""

    def __init__(self, line: str = "load()") -> None:
        self.calls: list[tuple[Any, ...]] = []
        frame = Frame("Cell In[7]", 3, "<module>", line, False)
        self._stack = Stack(MAIN, (frame,))

    def stacks(self, ranks: Any = None) -> RankStacks:
        return RankStacks({0: [self._stack]}, errors={1: "rank 1 is dead"})

    def sample(self, seconds: float, ranks: Any = None) -> Profile:
        self.calls.append(("sample", seconds))
        return Profile({0: Sampled(seconds, 500, [(self._stack, seconds)])})

    def restart(self, ranks: Any = None) -> None:
        self.calls.append(("restart", ranks))

    def abort(self, groups: Any, reason: str, ranks: Any, **more: Any) -> None:
        self.calls.append(("abort", groups, ranks))

    def rebuild(self, group: Any = None) -> list[str]:
        self.calls.append(("rebuild", group))
        return []


def _click(
    asked: Asked,
    what: str,
    head: dict[str, Any] | None = None,
    model: BoardModel | None = None,
    found: Sequence[Verdict] | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """Return the answer to a click on `model`, by default the board of four ranks.

    Rank 0 has issued an op in 'tp' that rank 1 has not. A diagnosis finds `found`.
    """
    made = [
        rank(n, group(), *([group("tp", (0, 1), issued=n)] if n < 2 else ()))
        for n in range(4)
    ]
    model = model or BoardModel.of(cluster(*made))
    model.head |= head or {}
    answers = queue.SimpleQueue[Any]()
    actions = BoardActions(
        asked,  # type: ignore[arg-type]
        diagnose=None if found is None else lambda: found,
        send=answers.put,
        get_model=lambda: model,
        show_verdicts=model.show_verdicts,
        on_done=lambda: None,
        source_line=lambda cell, line: "",
    )
    actions.start({"do": what, "id": "1", **parameters})
    return answers.get(timeout=30)


@pytest.mark.parametrize(
    ("dead", "frozen", "restarted"),
    [([1], [], [1]), ([], [2], [2]), ([3], [2], [2, 3])],
)
def test_a_restart_replaces_dead_and_frozen_ranks(
    dead: list[int], frozen: list[int], restarted: list[int]
) -> None:
    asked = Asked()
    answer = _click(
        asked, "restart", head={"dead": dead, "frozen": frozen}, groups=["g0"]
    )
    assert answer["ok"]
    assert "restarted" in answer["text"]
    assert asked.calls == [("restart", restarted), ("rebuild", None)]


def test_an_abort_ends_all_groups_of_the_question_at_once() -> None:
    asked, keys = Asked(), [group().key, group("tp", (0, 1)).key]
    answer = _click(asked, "abort", groups=["g0", "g1"])
    assert asked.calls == [("abort", keys, [0, 1, 2, 3])]
    assert answer["text"] == "Groups 'default', 'tp' aborted."


def test_a_rebuild_takes_in_groups_that_are_out_of_step() -> None:
    asked, keys = Asked(), [group().key, group("tp", (0, 1)).key]
    answer = _click(asked, "rebuild", groups=["g0"])
    assert asked.calls == [("rebuild", keys)]
    assert answer["text"] == "Groups 'default', 'tp' rebuilt."


def test_a_diagnosis_says_what_is_new() -> None:
    status, verdicts = simulated.hang(4, 2)
    model = BoardModel.of(status)
    told = [_click(Asked(), "diagnose", model=model, found=verdicts) for _ in "ab"]
    assert told[0]["text"] == "Diagnosis: missing ranks."
    # The banner has it: that the ranks were asked is what there is to say.
    said = "Diagnosis: missing ranks, as before: asked again at "
    assert told[1]["text"].startswith(said)
    none = _click(Asked(), "diagnose", model=model, found=[])
    assert none["text"].startswith("Nothing is wrong")


def test_hangs_that_are_over_are_dismissed() -> None:
    status, (verdict,) = simulated.hang(4, 2)
    model = BoardModel.of(status)
    model.show_verdicts([verdict])
    model.delta()
    again = group(generation=1, completed=None, started=None, enqueued=None)
    model.update(cluster(*(rank(n, again) for n in range(4))), 1.0)
    model.delta()
    assert model.banner().last
    assert _click(Asked(), "dismiss", model=model)["ok"]
    assert model.banner().last == ""


def test_a_profile_is_the_stacks_now_or_a_flame_graph() -> None:
    asked = Asked()
    now = _click(asked, "profile")
    assert now["title"].startswith("Where the ranks were at ")
    assert now["stacks"].split("\n\n") == [
        "rank 0: at cell 7 line 3\n    cell 7 line 3  load()",
        "rank 1: rank 1 is dead",
    ]
    sampled = _click(asked, "profile", seconds=5)
    assert asked.calls == [("sample", 5)]
    assert sampled["title"] == "Where the ranks spent their time"
    assert "rankscope-flame" in sampled["page"]


@pytest.mark.parametrize("seconds", [-1, 61, float("nan"), "5", True, None])
def test_a_profile_of_other_lengths_is_refused(seconds: object) -> None:
    asked = Asked()
    answer = _click(asked, "profile", seconds=seconds)
    assert not answer["ok"]
    assert "expected 0, for the stacks now, to 60" in answer["text"]
    assert asked.calls == []


def test_stacks_without_an_end_are_cut() -> None:
    answer = _click(Asked("x" * 2 * board_actions.STACKS), "profile")
    assert len(answer["stacks"]) < board_actions.STACKS + 200
    assert answer["stacks"].endswith(board_actions.TRUNCATED)
