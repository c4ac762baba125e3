"""`%dist_board --pin` in a JupyterLab with the package sidecar: a panel beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.backends.conformance.waiting import until
from tests.widgets.clicks import click_yes

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

    from tests.widgets.lab import Lab, Notebook

pytestmark = [pytest.mark.processes, pytest.mark.in_order, pytest.mark.timeout(300)]

CELLS = {
    "load": "%load_ext rankscope",
    "init": "%dist_init -n 2",
    "pin": "%dist_board --pin",
    "hang": "%%distributed -t 60\nif rank == 1:\n    dist.all_reduce(np.ones(4))",
    "again": "%dist_board --pin",
    "replace": "%dist_init -n 3 --replace",
    "unpin": "%dist_board --unpin",
    "shutdown": "%dist_shutdown",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook with the cells."""
    cells: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "id": name,
            # An error ends the cells that wait behind it. That the aborted cell has
            # ended is not seen on a page that was reloaded meanwhile.
            "metadata": {"tags": ["raises-exception"]} if name == "hang" else {},
            "source": source,
            "outputs": [],
            "execution_count": None,
        }
        for name, source in CELLS.items()
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path = tmp_path_factory.mktemp("notebook") / "docked.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab."""
    from tests.widgets.lab import lab

    with lab(tmp_path_factory.mktemp("lab"), browser) as found:
        yield found


@pytest.fixture(scope="module")
def notebook(server: Lab, file: Path) -> Notebook:
    """The notebook beside other panels, with two ranks and their board."""
    found = server.open(file, alone=False, width=1500)
    for name in ("load", "init"):
        found.run(name)
        found.wait(name)
    found.board.wait_for()
    return found


def _panel(notebook: Notebook) -> Locator:
    return notebook.page.locator(".jupyterlab-sidecar")


def _docked(notebook: Notebook) -> Locator:
    return _panel(notebook).locator(".rankscope-live")


def _bar(notebook: Notebook) -> Locator:
    return notebook.page.locator(".rankscope-bar")


def _run(notebook: Notebook, name: str) -> None:
    notebook.run(name)
    assert "Error" not in notebook.wait(name)


def test_it_stands_beside_the_notebook_and_no_bar_does(notebook: Notebook) -> None:
    _run(notebook, "pin")
    _docked(notebook).wait_for()
    until(lambda: _bar(notebook).count() == 0, 30)
    panel = _docked(notebook).bounding_box()
    cell = notebook.cell("pin").bounding_box()
    assert panel is not None
    assert cell is not None
    assert panel["x"] >= cell["x"] + cell["width"]


def test_it_is_live_and_its_lines_lead_to_the_cell(notebook: Notebook) -> None:
    notebook.run("hang")
    docked = _docked(notebook)
    until(lambda: "Missing ranks" in docked.locator(".banner").inner_text(), 60)
    docked.get_by_role("button", name="Profile").click()
    line = docked.get_by_role("button", name=re.compile(r"cell \d+ line 3")).first
    line.click()
    # The line of the cell is lit for a moment.
    lit = notebook.cell("hang").locator(".cm-line").nth(2)
    until(lambda: lit.evaluate("line => line.getAnimations().length > 0"), 30)
    notebook.shot("board-docked")


def test_after_a_reload_it_is_there_while_the_cell_hangs(notebook: Notebook) -> None:
    # JupyterLab saves the document that has the focus.
    notebook.cell("init").locator(".cm-content").click()
    notebook.save()
    notebook.reload()
    docked = _docked(notebook)
    until(lambda: "Missing ranks" in docked.locator(".banner").inner_text(), 60)
    assert docked.count() == 1
    notebook.shot("board-docked-reloaded")
    docked.get_by_role("button", name="Abort").click()
    click_yes(docked.get_by_role("button", name="yes"), 60)
    until(lambda: "Aborted" in docked.locator(".banner").inner_text(), 60)


def test_where_the_user_closes_it_the_bar_comes(notebook: Notebook) -> None:
    notebook.page.locator(".lm-TabBar-tab", has_text="Rankscope").locator(
        ".lm-TabBar-tabCloseIcon"
    ).click()
    _bar(notebook).wait_for()
    assert _panel(notebook).count() == 0
    _run(notebook, "again")
    _docked(notebook).wait_for()
    until(lambda: _bar(notebook).count() == 0, 30)


def test_it_goes_on_to_the_ranks_that_replace_these(notebook: Notebook) -> None:
    _run(notebook, "replace")
    docked = _docked(notebook)
    until(lambda: docked.locator(".title").all_inner_texts() == ["3 ranks"], 60)
    until(lambda: _bar(notebook).count() == 0, 30)


def test_unpin_takes_it_away(notebook: Notebook) -> None:
    _run(notebook, "unpin")
    until(lambda: _panel(notebook).count() == 0, 30)
    assert _bar(notebook).count() == 0


def test_it_goes_with_the_ranks(notebook: Notebook) -> None:
    _run(notebook, "pin")
    _docked(notebook).wait_for()
    _run(notebook, "shutdown")
    until(lambda: _panel(notebook).count() == 0, 30)
    assert notebook.errors == []
    notebook.page.close()


def test_in_the_mode_for_one_document_the_notebook_stays_in_sight(
    server: Lab, file: Path
) -> None:
    notebook = server.open(file, width=1500)
    for name in ("load", "init", "pin"):
        _run(notebook, name)
    _docked(notebook).wait_for()
    assert notebook.cell("pin").is_visible()
    notebook.shot("board-docked-one-document")
    _run(notebook, "shutdown")
    assert notebook.errors == []
