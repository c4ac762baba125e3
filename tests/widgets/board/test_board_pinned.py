"""The pinned board: a bar in sight with state, verdict and Abort."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.verdicts import Waiting
from rankscope.widgets.board.html import hang_html
from tests.widgets import simulated, statuses
from tests.widgets.clicks import click_yes
from tests.widgets.scene import Scene, idle
from tests.widgets.test_accessibility import two_groups

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

pytestmark = pytest.mark.processes


@pytest.fixture
def scene(browser: Browser) -> Iterator[Scene]:
    """A pinned board of four idle ranks, below which the page goes on for long."""
    home = "<div class='the-board'></div><div style='height: 4000px'></div>"
    made = Scene(browser, width=1000, height=500, home=home)
    _pin(made, True)
    yield made
    made.close()


def _pin(scene: Scene, pinned: bool) -> None:
    scene.page.page.evaluate("pinned => window.pin(pinned)", pinned)
    scene.page.play()


def _bar(scene: Scene) -> Locator:
    return scene.page.page.locator(".rankscope-bar")


def _has_bars(scene: Scene, count: int) -> None:
    until(lambda: _bar(scene).count() == count, 30)


def _text(scene: Scene) -> str:
    return " ".join(_bar(scene).locator(".line > :visible").all_inner_texts())


def test_it_stays_in_sight_with_state_and_verdict(scene: Scene) -> None:
    scene.page.page.evaluate("() => window.scrollTo(0, 3000)")
    assert "Idle No rank is running a cell." in _text(scene)
    abort = _bar(scene).get_by_role("button", name="Abort")
    assert abort.is_disabled()
    scene.take(*simulated.hang(4, 2))
    until(lambda: "Missing ranks Rank 2 has not entered" in _text(scene))
    box = _bar(scene).bounding_box()
    assert box is not None
    assert 0 < box["y"] < box["y"] + box["height"] <= 500
    assert abort.is_enabled()
    scene.page.shot("board-pinned")


def test_abort_asks_and_aborts(scene: Scene) -> None:
    scene.take(*simulated.hang(4, 2))
    scene.page.sent()
    bar = _bar(scene)
    bar.get_by_role("button", name="Abort").click()
    assert "Abort group 'default' on 4 ranks?" in _text(scene)
    click_yes(bar.get_by_role("button", name="yes"))
    (request,) = scene.page.sent()
    assert (request["do"], request["groups"]) == ("abort", ["g0"])
    scene.page.play(
        {"type": "did", "id": request["id"], "ok": True, "text": "Done so."}
    )
    assert "Done so." in _text(scene)


def test_a_cell_that_hangs_has_one_in_its_output(scene: Scene) -> None:
    """The sentence of the output gives way to it, and it goes with the output."""
    page = scene.page.page
    status, (verdict,) = simulated.hang(4, 2)
    cycle = (Waiting((0,), "recv #1", "pp", (1,)), Waiting((1,), "recv #1", "pp", (0,)))
    scene.take(status, [replace(verdict, cycle=cycle)])
    saved = hang_html("Missing ranks: why", "the-board", "14:03:12", 7, "<svg></svg>")
    page.evaluate(
        "html => document.body.insertAdjacentHTML("
        "'afterbegin', `<div id=\"out\">${html}</div>`)",
        saved,
    )
    bar = page.locator("#out .rankscope-hang")
    until(lambda: "Rank 2 has not entered" in bar.locator(".line").inner_text())
    assert not page.get_by_text("Missing ranks: why").is_visible()
    titles = page.locator("#out").get_by_text("Who waits for whom")
    assert [one.is_visible() for one in titles.all()] == [False, True]
    assert bar.locator(".line svg").is_visible()
    assert bar.get_by_role("button", name="Unpin").count() == 0
    bar.get_by_role("button", name="Abort").click()
    assert "Abort group 'default' on 4 ranks?" in bar.locator(".line").inner_text()
    scene.page.shot("board-hang-in-cell")
    # The question stays, with the focus, where why it hangs has changed.
    page.evaluate(
        "html => document.getElementById('out').innerHTML = html",
        hang_html("Missing ranks: others", "the-board", "14:03:13", 7),
    )
    yes = "document.querySelector('.rankscope-hang').shadowRoot.activeElement"
    until(lambda: page.evaluate(f"() => {yes}?.textContent") == "yes")
    assert "Abort group 'default' on 4 ranks?" in bar.locator(".line").inner_text()
    click_yes(bar.get_by_role("button", name="yes"))
    until(lambda: any(one.get("do") == "abort" for one in scene.page.sent()))
    page.evaluate("() => document.getElementById('out').replaceChildren()")
    until(lambda: page.locator(".rankscope-hang").count() == 0)
    # The focus was on a button of the bar, and goes to what comes next.
    live = "document.querySelector('.rankscope-live').shadowRoot"
    assert page.evaluate(f"() => {live}.activeElement?.textContent") == "Rebuild"


def test_while_a_cell_hangs_a_bar_comes_where_nothing_of_it_is_in_sight(
    scene: Scene,
) -> None:
    """As where the cell has printed much: its own bar is at the end of that."""
    page = scene.page.page
    _pin(scene, False)
    page.evaluate("() => window.scrollTo(0, 3000)")
    scene.take(*simulated.hang(4, 2))
    page.evaluate("() => window.hang(true)")
    until(lambda: "Missing ranks Rank 2 has not entered" in _text(scene), 30)
    for place, count in ((0, 0), (3000, 1)):
        page.evaluate(f"() => window.scrollTo(0, {place})")
        _has_bars(scene, count)
    page.evaluate(
        "html => document.body.insertAdjacentHTML('beforeend', html)",
        hang_html("why", "the-board", "14:03:12", 7),
    )
    page.evaluate("() => window.scrollTo(0, document.body.scrollHeight)")
    _has_bars(scene, 0)
    page.evaluate("() => window.scrollTo(0, 2000)")
    _has_bars(scene, 1)
    _bar(scene).get_by_role("button", name="Hide").click()
    assert _bar(scene).count() == 0
    # The next hang has one, which goes as that ends.
    for hangs in (False, True, False):
        page.evaluate("hangs => window.hang(hangs)", hangs)
        _has_bars(scene, int(hangs))


def test_in_a_narrow_cell_the_sentence_is_below_its_title(scene: Scene) -> None:
    page = scene.page.page
    page.set_viewport_size({"width": 620, "height": 400})
    scene.take(*simulated.hang(4, 2))
    page.evaluate(
        "html => document.body.insertAdjacentHTML('afterbegin', html)",
        hang_html("why", "the-board", "14:03:12", 7),
    )
    line = page.locator(".rankscope-hang .line")
    title = line.get_by_text("Missing ranks", exact=True).bounding_box()
    said = line.locator(".grow").first.bounding_box()
    assert title is not None
    assert said is not None
    assert said["x"] == pytest.approx(title["x"], abs=2)
    assert said["y"] >= title["y"] + title["height"]


def test_in_a_narrow_cell_all_answers_to_a_question_are_in_sight(scene: Scene) -> None:
    page = scene.page.page
    page.set_viewport_size({"width": 260, "height": 600})
    scene.take(*two_groups())
    page.evaluate(
        "html => document.body.insertAdjacentHTML('afterbegin', html)",
        hang_html("why", "the-board", "14:03:12", 7),
    )
    bar = page.locator(".rankscope-hang")
    until(lambda: bar.count() == 1, 30)
    bar.get_by_role("button", name="Abort").click()
    for answer in ("yes", "no", "only"):
        box = bar.get_by_role("button", name=re.compile(f"^{answer}")).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 260


@pytest.mark.parametrize(("cell", "there"), [(6, False), (7, True), (8, True)])
def test_that_of_a_cell_goes_once_the_cell_has_ended(
    scene: Scene, cell: int, there: bool
) -> None:
    """Cell 7 hangs. A page that was loaded again has the output of an earlier one."""
    page = scene.page.page
    scene.take(*simulated.hang(4, 2))
    page.evaluate(
        "html => document.body.insertAdjacentHTML('afterbegin', html)",
        hang_html("why", "the-board", "14:03:12", cell),
    )
    bar = page.locator(".rankscope-hang")
    text = page.get_by_text("As of 14:03:12: why")
    until(lambda: bar.count() == 1, 30)
    assert (bar.is_visible(), text.is_visible()) == (there, not there)
    scene.take(statuses.cluster(*idle(4)))
    until(text.is_visible, 30)
    assert not bar.is_visible()
    # The next hang is of another cell.
    status, verdicts = simulated.hang(4, 2)
    ranks = [replace(one, cell=9) for one in status.ranks]
    scene.take(replace(status, ranks=tuple(ranks)), verdicts)
    assert not bar.is_visible()


def test_that_of_a_cell_comes_once_the_page_knows_that_it_runs(scene: Scene) -> None:
    """On a busy machine the verdict may be there before the state of the ranks."""
    page = scene.page.page
    page.evaluate(
        "html => document.body.insertAdjacentHTML('afterbegin', html)",
        hang_html("why", "the-board", "14:03:12", 7),
    )
    text = page.get_by_text("As of 14:03:12: why")
    until(text.is_visible, 30)
    scene.take(*simulated.hang(4, 2))
    until(page.locator(".rankscope-hang").is_visible, 30)
    assert not text.is_visible()


@pytest.mark.parametrize("by", ["an abort", "the end of the kernel"])
def test_that_of_a_cell_gives_way_to_why_it_hung(scene: Scene, by: str) -> None:
    """In a page that was loaded again: the kernel takes its output from others."""
    page = scene.page.page
    scene.take(*simulated.hang(4, 2))
    page.evaluate(
        "html => document.body.insertAdjacentHTML('afterbegin', html)",
        hang_html("why", "the-board", "14:03:12", 7),
    )
    bar = page.locator(".rankscope-hang")
    until(bar.is_visible, 30)
    if by == "an abort":
        aborted = statuses.group(ranks=range(4), state="aborted", reason="by hand")
        scene.take(statuses.cluster(*(statuses.rank(n, aborted) for n in range(4))))
    else:
        page.evaluate("() => window.restart()")
    until(page.get_by_text("As of 14:03:12: why").is_visible, 30)
    assert not bar.is_visible()
    # Of a kernel that has ended, nothing tells whether the cell had.
    past = page.get_by_text("This cell has ended. While it hung:")
    assert past.is_visible() == (by == "an abort")
    scene.page.shot(f"board-hang-over-by-{by.split()[-1]}")


def test_it_opens_the_board_of_the_same_model(scene: Scene) -> None:
    opener = _bar(scene).get_by_role("button", name="Board")
    opener.click()
    drawer = _bar(scene).locator(".rankscope-live")
    scene.take(*simulated.hang(4, 2))
    until(lambda: "in flight" in drawer.locator(".row .c-state").all_inner_texts())
    # There is one group: a list of them would be empty.
    assert not drawer.locator(".group-list").is_visible()
    scene.page.shot("board-pinned-open")
    opener.click()
    assert drawer.count() == 0


def test_unpin_is_told_to_the_kernel(scene: Scene) -> None:
    scene.page.sent()
    _bar(scene).get_by_role("button", name="Unpin").click()
    assert _bar(scene).count() == 0
    assert {"traits": {"pinned": False}} in scene.page.sent()


def test_it_stays_when_the_output_is_cleared_and_goes_with_the_cluster(
    scene: Scene,
) -> None:
    page = scene.page.page
    page.evaluate("() => document.querySelector('.the-board').remove()")
    scene.page.play()
    scene.take(*simulated.hang(4, 2))
    until(lambda: "Missing ranks" in _text(scene))
    page.evaluate("() => window.leave()")
    assert _bar(scene).count() == 0
