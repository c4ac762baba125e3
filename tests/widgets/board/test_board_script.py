"""The board of a script's job: no button that the script would refuse."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.engines import ClusterError, ClusterStatus, FlightRecords
from rankscope.engines.cluster.job import refusals
from rankscope.engines.observe.profiling import Sampling
from rankscope.widgets.board.actions import BoardActions
from rankscope.widgets.board.feed import BoardFeed
from rankscope.widgets.board.model import BoardModel
from tests.widgets import simulated, statuses
from tests.widgets.bare_page import DARK, LIGHT
from tests.widgets.clicks import click_yes
from tests.widgets.scene import Scene

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def _of_script(status: ClusterStatus, allow_abort: bool = False) -> ClusterStatus:
    return replace(
        status,
        cluster_id="127.0.0.1:41489",
        launcher="train.py",
        backend="",
        script="train.py",
        refused=refusals("train.py", allow_abort),
    )


def _in_each(**fields: Any) -> ClusterStatus:
    """The job of four ranks whose group has `fields`."""
    one = statuses.group(**fields)
    ranks = (statuses.rank(n, one, state="busy", busy_for=60.0) for n in range(4))
    return _of_script(statuses.cluster(*ranks))


class TestWords:
    def test_ranks_run_the_script(self) -> None:
        found = BoardModel.of(_in_each())
        assert str(found.banner()) == "Running: Ranks 0–3 run train.py."
        assert found.head["facts"] == ["train.py", "job 127.0.0.1:41489"]

    def test_no_rebuild_is_offered(self) -> None:
        found = BoardModel.of(_in_each(state="aborted", reason="by hand"))
        assert str(found.banner()) == "Aborted: Group 'default': by hand."

    def test_no_restart_is_offered(self) -> None:
        dead = statuses.rank(
            2, statuses.group(), state="dead", reason="rank 2 has ended: KeyError"
        )
        found = BoardModel.of(_of_script(statuses.cluster(dead)))
        assert str(found.banner()) == "Rank dead: Rank 2 has ended: KeyError."

    @pytest.mark.parametrize(
        ("ended", "said"),
        [
            ("the job has ended: rank 2: KeyError", "The job has ended: rank 2: Key"),
            (None, "This notebook has detached at "),
        ],
    )
    def test_the_end_says_why(self, ended: str | None, said: str) -> None:
        status = _in_each()

        class Job:
            n = 4
            closed = False
            detached = True

            def __init__(self) -> None:
                self.ended: str | None = None

            def glance(self, ranks: Any = None) -> ClusterStatus:
                return status

            def status(self, **options: Any) -> ClusterStatus:
                return status

            def flight_records(self, ranks: Any, **options: Any) -> FlightRecords:
                return FlightRecords()

            def start_sampling(self, ranks: Any, **options: Any) -> Sampling:
                raise ClusterError("there is no rank here")

            def subscribe(self, callback: Callable[..., None]) -> Callable[[], None]:
                return lambda: None

        job = Job()
        feed = BoardFeed(job, lambda message: None, lambda: None)  # type: ignore[arg-type]
        feed.refresh()
        job.ended = ended
        feed.close()
        banner = feed.model.banner()
        assert (banner.title, banner.text[: len(said)]) == ("Ended", said)

    def test_an_abort_that_was_allowed_promises_no_rebuild(self) -> None:
        model = BoardModel.of(_of_script(simulated.hang(4, 2)[0], allow_abort=True))
        aborted: list[Any] = []

        class Asked:
            def abort(self, groups: Any, why: str, ranks: Any, **more: Any) -> None:
                aborted.append((groups, ranks, more["by"]))

        answers = queue.SimpleQueue[Any]()
        actions = BoardActions(
            Asked(),  # type: ignore[arg-type]
            diagnose=None,
            send=answers.put,
            get_model=lambda: model,
            show_verdicts=lambda verdicts: None,
            on_done=lambda: None,
            source_line=lambda cell, line: "",
        )
        actions.start({"do": "abort", "id": "1", "groups": [model.groups[0].id]})
        answer = answers.get(timeout=30)
        assert aborted == [([model.groups[0].key], [0, 1, 2, 3], "the board")]
        assert answer["ok"]
        assert answer["text"] == (
            "Group 'default' aborted; the script's ops end with an error that says why."
        )


@pytest.fixture
def scene(browser: Browser) -> Iterator[Scene]:
    """A board of four ranks."""
    made = Scene(browser, width=1100)
    yield made
    made.close()


def _hang(scene: Scene, allow_abort: bool) -> None:
    status, verdicts = simulated.hang(4, 2)
    scene.take(_of_script(status, allow_abort), verdicts)


@pytest.mark.processes
def test_what_the_script_refuses_cannot_be_clicked(scene: Scene) -> None:
    assert scene.button("Rebuild").is_visible()
    _hang(scene, allow_abort=False)
    assert not scene.button("Rebuild").is_visible()
    assert scene.button("Diagnose").is_enabled()
    abort = scene.button("Abort")
    assert abort.is_disabled()
    assert abort.get_attribute("title") == (
        "train.py does not allow notebooks to abort: start it with "
        "RANKSCOPE_ALLOW_ABORT=1, or rankscope.torch.watch(allow_abort=True)"
    )


@pytest.mark.processes
def test_a_dead_rank_brings_no_restart(scene: Scene) -> None:
    dead = statuses.rank(3, statuses.group(), state="dead", reason="rank 3: killed")
    scene.take(_of_script(statuses.cluster(dead)))
    assert not scene.button("Restart and rebuild").is_visible()
    assert scene.texts("banner") == ["Rank dead Rank 3: killed."]


@pytest.mark.processes
def test_an_abort_that_the_script_allows_asks_and_is_sent(scene: Scene) -> None:
    _hang(scene, allow_abort=True)
    abort = scene.button("Abort")
    assert abort.is_enabled()
    assert "The script ends, unless it handles" in (abort.get_attribute("title") or "")
    scene.page.sent()
    abort.click()
    assert scene.texts("what") == ["Abort group 'default' on 4 ranks?"]
    click_yes(scene.button("yes"))
    assert [one["do"] for one in scene.page.sent()] == ["abort"]


@pytest.mark.processes
def test_the_pinned_bar_has_the_same_abort(scene: Scene) -> None:
    scene.page.page.evaluate("() => window.pin(true)")
    _hang(scene, allow_abort=False)
    bar = scene.page.page.locator(".rankscope-bar")
    assert bar.get_by_role("button", name="Abort").is_disabled()


@pytest.mark.processes
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("allow_abort", [False, True])
def test_pictures(browser: Browser, theme: str, allow_abort: bool) -> None:
    made = Scene(browser, width=1100, theme=LIGHT if theme == "light" else DARK)
    _hang(made, allow_abort)
    assert not made.button("Rebuild").is_visible()
    made.page.shot(f"board-script-{'abort' if allow_abort else 'reads'}-{theme}")
    made.close()
