"""The pictures of the docs: each board says what it said when they were taken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.backends.observe.test_when_it_hangs import PAGE, SECTIONS
from tests.widgets.board import gallery

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Each opens a page in a browser.
pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", gallery.NAMES)
def test_a_picture_shows_what_the_board_says(browser: Browser, name: str) -> None:
    status, verdicts = gallery.hung(name)
    found = gallery.shown(browser, name)
    said = gallery.read(found)
    texts = json.loads(gallery.TEXTS.read_text(encoding="utf-8"))
    assert said == texts[name], "the pictures are old: make pictures"
    (banner,) = said["banner"]
    assert banner.startswith(name.capitalize())
    ranks = found.page.board().locator(".row.blamed .c-rank").all_inner_texts()
    # An abort leaves who was at fault.
    verdicts = verdicts or gallery.hung("missing ranks")[1]
    blamed = [rank for verdict in verdicts for rank in verdict.culprits]
    assert [int(rank) for rank in ranks] == blamed
    assert len(said["rows"]) == 1 + len(status.ranks)
    assert gallery.cut(found) == []
    found.close()


def test_there_is_a_picture_in_each_section_of_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in gallery.NAMES:
        place = SECTIONS.get(name, text)
        assert f"](_static/{gallery.file_of(name).name})" in place, name


def test_the_pictures_are_small() -> None:
    pictures = sorted(gallery.PICTURES.glob("board_*.png"))
    expected = {gallery.file_of(name) for name in (*gallery.NAMES, "hang")}
    assert {*pictures} == expected
    assert sum(picture.stat().st_size for picture in pictures) < 400_000
