"""The board in a real JupyterLab, over real ranks: seen, understood, ended.

The notebook on hangs, cell after cell, as a person goes through it. What was seen is
in .artifacts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankscope.backends.conformance.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.widgets.lab import Lab
    from tests.widgets.person import Person

pytestmark = [pytest.mark.processes, pytest.mark.in_order, pytest.mark.timeout(300)]

#: Seconds that a page which opens on a busy machine may take.
BUSY = 120
#: What anywidget says of a model that it gives up.
GIVEN_UP = "Error: [anywidget] Failed to initialize model."
NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "05_hang.ipynb"


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab."""
    from tests.widgets.lab import lab

    with lab(tmp_path_factory.mktemp("lab"), browser) as found:
        yield found


@pytest.fixture(scope="module")
def person(server: Lab) -> Person:
    """Somebody in the notebook on hangs, with four ranks and their board."""
    from tests.widgets.person import Person

    # The notebook's 60 s are over before a busy machine has opened a second window.
    found = Person(server.open(NOTEBOOK, patience=3 * BUSY), "lab")
    found.finish("load")
    assert "4 ranks ready" in found.finish("init")
    found.notebook.board.wait_for()
    return found


def test_it_opens_with_the_ranks(person: Person) -> None:
    person.banner("^Idle")
    assert person.column("state") == ["idle"] * 4
    person.shot("01-idle")
    person.finish("patience")
    assert "60" in person.finish("kept")


def test_a_rank_that_is_missing(person: Person) -> None:
    person.run("missing")
    person.banner("^In flight.*Ranks 0–1, 3 are in all_reduce #2")
    person.shot("02-in-flight")
    said = person.verdict("^Missing ranks")
    assert re.search(
        r"Rank 2 has not entered all_reduce #\d+ \(cell \d+ line \d+\): it left cell "
        r"\d+ .*; ranks 0–1, 3 wait in it",
        said,
    )
    waits = "waits for rank 2"
    until(lambda: person.column("verdict") == [waits, waits, "not entered", waits])
    assert person.notebook.is_running("missing")
    person.shot("03-missing")


def test_the_timeline_of_a_hang(person: Person) -> None:
    person.button("Timeline").click()
    until(lambda: person.notebook.board.locator("canvas.lanes").is_visible())
    # Drawn once the ranks have told what they did.
    until(lambda: person.notebook.board.locator(".timeline").inner_text().strip())
    person.shot("04-timeline")
    person.button("Timeline").click()
    assert person.notebook.is_running("missing")


def test_where_the_ranks_are_while_the_cell_runs(person: Person) -> None:
    person.button("Profile").click()
    panel = person.notebook.board.locator(".stacks")
    panel.wait_for()
    said = panel.locator("pre").inner_text()
    assert re.search(r"ranks 0–1, 3: at cell \d+ line 4\n", said)
    assert "rank 2: idle: no cell runs" in said
    person.shot("04-stacks")
    person.button("Sample 5 s").click()
    calls = panel.frame_locator("iframe").locator(".node > button")
    calls.filter(has_text="all_reduce").first.wait_for()
    person.shot("04-flame-graph")
    person.button("Close").click()
    assert person.notebook.is_running("missing")


def test_a_second_window_and_a_reload_have_the_live_board(
    person: Person, server: Lab
) -> None:
    """While the cell hangs, on a busy machine, too; the buttons of the window work."""
    person.notebook.save()
    shown = server.show(person.notebook.file, idle=False, busy=True)
    # Also where this fails: the tests after it go on in the first page.
    with closing(shown.page):
        window = type(person)(shown, "window")
        window.banner("^Missing ranks", BUSY)
        window.shot("04-second-window")
        window.notebook.reload()
        window.banner("^Missing ranks", BUSY)
        window.button("Diagnose").click()
        until(lambda: "Diagnosis: missing ranks" in window.texts("head")[0], BUSY)
        assert window.button("Abort").is_enabled()
        assert {one.splitlines()[0] for one in shown.errors} == {GIVEN_UP}


def test_abort_and_rebuild(person: Person) -> None:
    output = person.abort("missing")
    assert "requested from the board" in output
    assert "requested from the board" in person.banner("^Aborted")
    person.shot("05-aborted")
    person.rebuild()
    person.shot("06-rebuilt")
    assert "[0-3] [60. 60. 60.]" in person.finish("check")


def test_jupyterlabs_shortcuts_while_the_board_has_the_focus(person: Person) -> None:
    """Ctrl+S saves and Ctrl+Shift+C opens the commands; "d d" deletes no cell."""
    page, file = person.notebook.page, person.notebook.file
    cells = page.locator(".jp-Notebook .jp-Cell")
    count, saved = cells.count(), file.stat().st_mtime_ns
    person.button("Diagnose").focus()
    for key in ("d", "d", "a", "b", "x"):
        page.keyboard.press(key)
    page.keyboard.press("Control+s")
    until(lambda: file.stat().st_mtime_ns != saved, 60, "Ctrl+S to save")
    assert cells.count() == count
    page.keyboard.press("Control+Shift+c")
    commands = page.locator(".jp-ModalCommandPalette, #modal-command-palette").first
    until(commands.is_visible, 30, "the commands to open")
    page.keyboard.press("Escape")
    until(lambda: not commands.is_visible(), 30)
    # A focused button is pressed by the keys for that, and not by shortcuts.
    person.button("Diagnose").focus()
    page.keyboard.press("Enter")
    until(lambda: "Nothing is wrong" in person.texts("head")[0], 30)


def test_two_operations_that_do_not_match(person: Person) -> None:
    person.run("mismatch")
    said = person.verdict("^Op mismatch")
    assert re.search(r"Rank 1 issued broadcast #2 \(cell \d+ line 4\)", said)
    assert re.search(r"ranks 0, 2–3 issued all_reduce #2 \(cell \d+ line 6\)", said)
    until(lambda: person.column("verdict")[1] == "other op", what="rank 1's verdict")
    person.shot("07-mismatch")
    person.abort("mismatch")
    person.rebuild()
    assert "[0-3] [60. 60. 60.]" in person.finish("mismatch-check")


def test_a_rank_that_dies(person: Person) -> None:
    person.run("dead")
    assert "killed by SIGKILL" in person.verdict("^Rank dead")
    until(lambda: person.column("state")[3] == "dead")
    person.notebook.wait("dead")
    person.shot("08-dead")
    person.confirm("Restart and rebuild")
    person.banner("^Idle", 60)
    person.shot("09-restarted")
    # Its variables are gone; those of the others are not.
    output = person.finish("dead-check")
    assert "[0-2] kept is there" in output
    assert re.search(r"\[3\] +kept is gone", output)


def test_a_saved_notebook_shows_the_last_state(person: Person, server: Lab) -> None:
    notebook = person.notebook
    assert "4 ranks ended" in person.finish("shutdown")
    until(lambda: notebook.page.locator(".rankscope-live").count() == 0)
    notebook.save()
    assert notebook.errors == []
    cells = json.loads(notebook.file.read_text())["cells"]
    outputs = next(cell["outputs"] for cell in cells if cell["id"] == "init")
    boards = [
        o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", ())
    ]
    assert any("Ended" in "".join(board) for board in boards)
    # A copy, which no kernel has anything to do with.
    copy = notebook.file.with_name("saved.ipynb")
    copy.write_text(notebook.file.read_text())
    again = server.show(copy)
    shown = again.cell("init")
    until(lambda: "The ranks were shut down at" in shown.inner_text())
    assert "model not found" not in shown.inner_text()
    shown.scroll_into_view_if_needed()
    again.shot("board-lab-10-saved")


def test_a_board_whose_kernel_is_gone_says_so(person: Person) -> None:
    assert "4 ranks ready" in person.finish("init")
    person.banner("^Idle")
    person.notebook.restart_kernel()
    said = person.banner("^No kernel|^No answer", 60)
    assert re.search(r"\d\d:\d\d:\d\d", said)
    for name in ("Profile", "Diagnose", "Abort", "Rebuild"):
        assert person.button(name).is_disabled()
    person.shot("11-kernel-gone")
    assert person.notebook.errors == []
