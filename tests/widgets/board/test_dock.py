"""Where the panel beside the notebook opens, and where none can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rankscope.widgets.board import dock
from rankscope.widgets.board.dock import Dock

BUNDLE = {"text/html": "<div class='the-board'></div>", "text/plain": "4 ranks"}


@pytest.fixture
def docked() -> Iterator[Dock]:
    made = Dock(lambda: BUNDLE)
    yield made
    made.close()


def _panel(docked: Dock) -> Any:
    docked.open()
    return docked._panel


@pytest.mark.parametrize("shell", [None, "", "some-other-mode", 3, ["right"]])
def test_a_page_without_panels_has_none(docked: Dock, shell: object) -> None:
    docked.note_page("page", shell)
    assert _panel(docked) is None


@pytest.mark.parametrize(
    ("shells", "anchor"),
    [
        (["multiple-document"], "split-right"),
        (["single-document"], "right"),
        # The panel opens in both pages, and hides the notebook in neither.
        (["multiple-document", "single-document"], "right"),
        (["single-document", "multiple-document"], "right"),
        ([None, "multiple-document"], "split-right"),
    ],
)
def test_the_panel_hides_no_notebook(
    docked: Dock, shells: list[str | None], anchor: str
) -> None:
    for page, shell in enumerate(shells):
        docked.note_page(str(page), shell)
    panel = _panel(docked)
    assert panel.anchor == anchor
    assert panel.outputs[0]["data"] == BUNDLE


def test_a_page_that_was_closed_counts_no_more(docked: Dock) -> None:
    docked.note_page("one", "single-document")
    docked.note_page("two", "multiple-document")
    docked.note_page("one", None)
    assert _panel(docked).anchor == "split-right"


def test_there_is_one_panel_until_it_is_closed(docked: Dock) -> None:
    docked.note_page("page", "multiple-document")
    first = _panel(docked)
    assert _panel(docked) is first
    docked.close()
    docked.close()
    assert first.comm is None
    assert _panel(docked) is not first


def test_without_the_package_there_is_none(
    docked: Dock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dock, "find_spec", lambda name: None)
    docked.note_page("page", "multiple-document")
    assert _panel(docked) is None
