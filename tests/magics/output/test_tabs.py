"""Displays of ranks: equal ones once, others in the tabs of one output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.magics.output.deduplicate import Item
from rankscope.magics.output.parse import Bundle, OutputParser
from rankscope.magics.output.tabs import can_be_in_tab, tabs
from tests.magics.output.test_render import line, renderer_on
from tests.widgets.untrusted import words

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: A single pixel.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)


def html(text: str) -> Bundle:
    return Bundle({"text/html": f"<b>{text}</b>", "text/plain": text})


def shown(text: str, *ranks: int) -> Item:
    return Item("display", ranks, (html(text),) * len(ranks))


def test_displays_that_differ_are_tabs_of_one_output() -> None:
    renderer, publisher = renderer_on(kernel=True)
    renderer.show([shown("a", 0, 1), shown("b", 2), shown("c", 3)])
    ((_, data, _),) = publisher.events
    assert data["text/plain"] == "ranks 0–1:\na\nrank 2:\nb\nrank 3:\nc"
    assert re.findall(r">(ranks? [\d–]+)</label>", data["text/html"]) == [
        "ranks 0–1", "rank 2", "rank 3",
    ]  # fmt: skip


def test_a_page_that_is_not_trusted_shows_all_panels_and_no_buttons() -> None:
    bundle = tabs([((0, 1), [html("a")]), ((2,), [html("b")])])
    assert words(bundle["text/html"]) == "ranks 0–1 a rank 2 b"


def test_what_one_rank_shows_stays_together_and_in_order() -> None:
    renderer, publisher = renderer_on(kernel=True)
    renderer.show([shown("a", 0), shown("b", 0), shown("c", 1), shown("all", 0, 1)])
    (_, tabbed, _), (_, header, _), (_, body, _) = publisher.events
    assert tabbed["text/plain"] == "rank 0:\na\nb\nrank 1:\nc"
    assert header["text/plain"] == "ranks 0–1"
    assert body["text/plain"] == "all"


def test_what_all_ranks_share_needs_no_tab() -> None:
    renderer, publisher = renderer_on(kernel=True)
    renderer.show([shown("a", 0, 1, 2, 3)])
    assert [data["text/plain"] for _, data, _ in publisher.events] == [
        "ranks 0–3", "a",
    ]  # fmt: skip


def test_displays_that_came_one_by_one_are_drawn_again_as_tabs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    renderer, publisher = renderer_on(kernel=True)
    renderer.show([shown("a", 0)])
    assert not renderer.is_provisional
    renderer.show([shown("b", 1)])
    assert renderer.is_provisional
    publisher.events.clear()
    renderer.redraw([shown("a", 0), shown("b", 1)])
    (clear, (_, data, _)) = publisher.events
    assert clear == ("clear", True)
    assert data["text/plain"] == "rank 0:\na\nrank 1:\nb"
    assert not renderer.is_provisional
    renderer.show([line("between", 0)])
    renderer.show([shown("c", 1)])
    assert not renderer.is_provisional


def result(text: str, *ranks: int) -> Item:
    bundle = Bundle({"text/plain": text})
    return Item("text", ranks, (bundle,) * len(ranks))


def test_a_result_is_in_the_tab_of_what_its_rank_displayed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    renderer, publisher = renderer_on(kernel=True)
    items = [shown("a", 0), result("7", 0), shown("b", 1), result("<8>", 1)]
    # One by one, as they come.
    for one in items:
        renderer.show([one])
    assert renderer.is_provisional
    assert capsys.readouterr().out == "[0]   7\n[1]   <8>\n"
    publisher.events.clear()
    renderer.redraw(items)
    (_, (_, data, _)) = publisher.events
    assert data["text/plain"] == "rank 0:\na\n7\nrank 1:\nb\n<8>"
    assert "<b>b</b></div><pre>&lt;8&gt;</pre></div>" in data["text/html"]
    assert capsys.readouterr().out == ""


def test_results_that_are_text_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    renderer, publisher = renderer_on(kernel=True)
    # What one rank alone displays hides no other rank's result in a tab.
    renderer.show([result("1", 0), result("2", 1, 2), shown("a", 3)])
    assert capsys.readouterr().out == "[0]   1\n[1-2] 2\n"
    assert [data["text/plain"] for _, data, _ in publisher.events] == ["rank 3", "a"]
    assert not renderer.is_provisional


@pytest.mark.parametrize(
    ("bundle", "held"),
    [
        (html("x"), True),
        (Bundle({"image/png": PNG, "text/plain": "<Figure>"}), True),
        (Bundle({"text/html": "x", "text/latex": "$x$"}), True),
        (Bundle({"text/plain": "x"}), False),
        (Bundle({"text/latex": "$x$", "text/plain": "x"}), False),
        (Bundle({"application/vnd.plotly.v1+json": {}, "text/html": "x"}), False),
        (Bundle({"application/javascript": "x", "text/plain": "x"}), False),
        (Bundle({"text/html": "x"}, display_id="theirs"), False),
    ],
)
def test_html_holds_pictures_and_tables_and_no_more(bundle: Bundle, held: bool) -> None:
    assert can_be_in_tab(bundle) is held


def _keys(*bundles: dict[str, Any]) -> int:
    """Return how many of the outputs of as many ranks differ."""
    parser = OutputParser(range(len(bundles)), 1)
    outputs = [{"output_type": "display_data", "data": one} for one in bundles]
    found = [parser.feed(rank, one)[-1].key for rank, one in enumerate(outputs)]
    return len(set(found))


def test_equal_displays_fold_although_their_identities_differ() -> None:
    objects = [{"text/html": "x", "text/plain": f"<At 0x7f{n}2345678>"} for n in "ab"]
    assert _keys(*objects) == 1
    tables = [{"text/html": f'<th id="T_{n}1b2c_row0">'} for n in "ab"]
    assert _keys(*tables) == 1
    assert _keys({"text/html": "T_1 0x1"}, {"text/html": "T_2 0x2"}) == 2


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page with twelve tabs, and below them an output of two."""
    figure = Bundle(
        {"image/png": PNG, "text/plain": "<Figure 1>"}, {"image/png": {"width": 30}}
    )
    many = tabs([((rank,), (html(f"of {rank}"),)) for rank in range(12)])
    two = tabs([((0,), (figure, html("left"))), ((1, 2), (html("right"),))])
    path: Path = tmp_path_factory.mktemp("tabs") / "tabs.html"
    path.write_text(many["text/html"] + two["text/html"], encoding="utf-8")
    found = browser.new_page()
    found.goto(path.as_uri())
    yield found
    found.close()


@pytest.mark.processes
def test_a_click_shows_the_panel_of_a_rank(page: Page) -> None:
    many, two = page.locator(".rankscope-tabs").all()
    assert many.inner_text().split()[:13] == [*map(str, range(12)), "of"]
    assert many.locator(".panel:visible").inner_text() == "of 0"
    many.locator("label", has_text="11").click()
    assert many.locator(".panel:visible").inner_text() == "of 11"
    # The other output is another one.
    assert two.locator(".panel:visible").inner_text() == "left"
    assert two.locator("img").get_attribute("alt") == "<Figure 1>"
    assert two.locator("img").bounding_box()["width"] == 30  # type: ignore[index]
    two.locator("input").first.focus()
    page.keyboard.press("ArrowRight")
    assert two.locator(".panel:visible").inner_text() == "right"
