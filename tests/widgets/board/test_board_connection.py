"""The board in a browser when its kernel or its ranks are gone: grey, no buttons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.widgets import simulated
from tests.widgets.scene import Scene, lanes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.processes

BUTTONS = ("Profile", "Diagnose", "Abort", "Rebuild")
CLOCK = r"\d\d:\d\d:\d\d"


@pytest.fixture
def scene(browser: Browser) -> Iterator[Scene]:
    """A board of four ranks in a hang; the test moves the clock of its page."""
    made = Scene(browser, width=1280, clock=True)
    made.take(*simulated.hang(4, 2))
    yield made
    made.close()


def _run_for(scene: Scene, seconds: float) -> None:
    scene.page.page.clock.run_for(int(seconds * 1000))
    scene.page.play()


def _is_over(scene: Scene) -> bool:
    return "over" in (
        scene.page.board().locator("section").get_attribute("class") or ""
    )


def _press_abort(scene: Scene) -> None:
    scene.button("Abort").click()
    # Not the second click of a double click.
    _run_for(scene, 1)
    scene.button("yes").click()
    assert scene.button("Aborting…").is_disabled()


def test_beats_keep_it_alive(scene: Scene) -> None:
    for beat in range(6):
        _run_for(scene, 4)
        scene.page.play({"type": "beat", "now": 104.0 + 4 * beat})
    assert not _is_over(scene)
    assert scene.button("Abort").is_enabled()


def test_silence_ends_it_and_says_since_when(scene: Scene) -> None:
    _press_abort(scene)
    _run_for(scene, 13)
    assert _is_over(scene)
    (banner,) = scene.texts("banner")
    assert re.search(f"No answer Nothing has come .* since {CLOCK}", banner)
    for name in BUTTONS:
        assert scene.button(name).is_disabled()
        assert "since" in (scene.button(name).get_attribute("title") or "")
    assert scene.texts("news") == [
        "No answer came: the connection to the kernel was lost meanwhile."
    ]
    # No time goes on in a picture.
    elapsed = scene.texts("c-elapsed")
    _run_for(scene, 5)
    assert scene.texts("c-elapsed") == elapsed


def test_the_next_message_brings_it_back(scene: Scene) -> None:
    _run_for(scene, 13)
    scene.page.sent()
    scene.page.play({"type": "beat", "now": 120.0})
    assert {"sync": 1} in scene.page.sent()
    assert not _is_over(scene)
    assert scene.texts("banner")[0].startswith("Missing ranks")
    assert scene.button("Abort").is_enabled()


def test_an_answer_that_comes_late_is_shown(scene: Scene) -> None:
    """As of a kernel on a busy machine, which was silent for so long."""
    _press_abort(scene)
    (request,) = [one for one in scene.page.sent() if one.get("do") == "abort"]
    _run_for(scene, 13)
    assert scene.texts("news")[0].startswith("No answer came")
    scene.page.play({"type": "did", "id": request["id"], "ok": True, "text": "Done."})
    assert not _is_over(scene)
    assert scene.texts("news") == []
    assert "Done." in scene.texts("head")[0]


def test_a_restart_is_shown_at_once(scene: Scene) -> None:
    _press_abort(scene)
    scene.page.sent()
    scene.page.page.evaluate("() => window.restart()")
    scene.page.play()
    assert _is_over(scene)
    (banner,) = scene.texts("banner")
    assert re.search(f"No kernel The kernel was restarted .* at {CLOCK}", banner)
    assert all(scene.button(name).is_disabled() for name in BUTTONS)
    # Nothing is sent to a kernel that has no such board.
    _run_for(scene, 40)
    assert scene.page.sent() == []


def test_a_page_that_slept_waits_for_messages_on_their_way(scene: Scene) -> None:
    scene.page.sent()
    # At once, as where the machine sleeps: timers fire once.
    scene.page.page.clock.fast_forward(3_600_000)
    scene.page.play()
    assert not _is_over(scene)
    # The kernel may have taken the page for closed.
    assert any("watch" in message for message in scene.page.sent())
    _run_for(scene, 13)
    assert _is_over(scene)


def test_it_tells_how_many_letters_a_line_of_the_notebook_has(browser: Browser) -> None:
    """Errors are broken between words there, and not once more by the page."""
    style = "--jp-code-font-size: 13px; --jp-code-font-family: monospace"
    home = f"<div class='jp-Notebook' style='{style}'><div class='the-board'></div>"
    scene = Scene(browser, width=624, home=f"{home}</div>", clock=True)
    (watch,) = scene.page.sent()
    line = scene.page.page.locator("body").evaluate(
        """(body, letters) => {
          const line = document.createElement("span");
          line.style = "font: 13px monospace; white-space: pre";
          line.textContent = "x".repeat(letters);
          body.append(line);
          return line.getBoundingClientRect().width;
        }""",
        watch["letters"],
    )
    assert 580 < line <= 600
    scene.page.page.set_viewport_size({"width": 324, "height": 400})
    _run_for(scene, 20)
    (renewed,) = scene.page.sent()
    assert renewed["letters"] < 0.6 * watch["letters"]
    scene.close()


def test_the_timeline_stays_and_exports_nothing(scene: Scene) -> None:
    scene.button("Timeline").click()
    scene.page.play(lanes(absent=2))
    _run_for(scene, 13)
    assert scene.button("Export").is_disabled()
    scene.button("All").click()


def test_ranks_that_ended_leave_a_grey_board(scene: Scene) -> None:
    scene.model.head = {
        **scene.model.head,
        "state": "stopped",
        "stopped_at": "14:03:12",
    }
    scene.model.show_verdicts([])
    scene.page.play(scene.model.delta())
    assert _is_over(scene)
    assert scene.texts("banner") == ["Ended The ranks were shut down at 14:03:12."]
    assert all(scene.button(name).is_disabled() for name in BUTTONS)
    # No ranks, no beats: that is no lost connection.
    _run_for(scene, 60)
    assert scene.texts("banner")[0].startswith("Ended")
