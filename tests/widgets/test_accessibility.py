"""axe-core finds nothing serious on the board and on the page of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import Fault, Verdict, Waiting
from rankscope.backends.post_mortem.report import Report
from rankscope.engines import ClusterStatus
from rankscope.widgets.board.html import board_html, hang_html
from rankscope.widgets.board.model import BoardModel
from rankscope.widgets.report.page import report_page
from tests.widgets import simulated, statuses
from tests.widgets.bare_page import DARK, LIGHT
from tests.widgets.board import gallery
from tests.widgets.report.report_scenes import eight, many
from tests.widgets.scene import Scene, lanes

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.processes

# Colours alone differ between two themes.
_RUN = """([place, colours]) => axe.run(place, {
  resultTypes: ["violations"], ...(colours && { runOnly: ["color-contrast"] }),
}).then(({ violations }) =>
  violations.filter(({ impact }) => impact === "serious" || impact === "critical")
    .flatMap(({ id, nodes }) => nodes.map((node) =>
      `${id}: ${node.html} ${node.failureSummary}`)))"""


def faults(page: Page, place: str = "html", colours: bool = False) -> list[str]:
    """Return what axe-core calls serious or critical."""
    base = pytest.importorskip("axe_playwright_python.base", reason="make environment")
    if not page.evaluate("'axe' in window"):
        page.evaluate(base.AXE_SCRIPT)
    return page.evaluate(_RUN, [place, colours])


#: Of the gallery those that differ in colours.
COLOURS = ("missing ranks", "rank not responding", "deadlock", "undecided", "aborted")


def situations(names: Sequence[str]) -> Iterator[tuple[str, BoardModel]]:
    """Boards of the gallery."""
    for name in names:
        found = BoardModel()
        if name == gallery.ABORTED:
            status, verdicts = gallery.hung("missing ranks")
            found.update(status, 200.0)
            found.show_verdicts(verdicts)
            found.delta()
        status, verdicts = gallery.hung(name)
        found.show_verdicts(verdicts)
        found.update(status, 201.0)
        yield name, found


def two_groups() -> tuple[ClusterStatus, list[Verdict]]:
    """Two ranks that wait for each other in two groups."""
    now = simulated.op(14, state="started", elapsed=6.2)
    flying: dict[str, Any] = {"started": now, "oldest": now, "in_flight": 1}
    rows, columns = GroupKey("rows", (0, 1)), GroupKey("columns", (0, 1))
    ranks = [
        statuses.rank(
            rank,
            *(
                statuses.group(key.name, key.ranks, **(flying if key == own else {}))
                for key in (rows, columns)
            ),
            state="busy",
            cell=7,
        )
        for rank, own in enumerate((rows, columns))
    ]
    cycle = (
        Waiting((0,), "all_reduce #14", "rows", (1,)),
        Waiting((1,), "all_reduce #14", "columns", (0,)),
    )
    verdict = Verdict(
        *(Fault.DEADLOCK, rows, (0, 1), (), "all_reduce", 14, "why"),
        groups=(rows, columns),
        cycle=cycle,
    )
    return statuses.cluster(*ranks), [verdict]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_the_board(browser: Browser, theme: dict[str, str]) -> None:
    scene = Scene(browser, width=736, height=700, theme=theme)

    def look() -> list[str]:
        return faults(scene.page.page, ".rankscope-live", theme is DARK)

    seen = {"idle": look()}
    for name, model in situations(COLOURS if theme is DARK else gallery.NAMES):
        scene.page.play(model.full())
        assert scene.texts("banner")
        scene.page.board().locator("details").evaluate("one => { one.open = true; }")
        seen[name] = look()
    scene.model = BoardModel()
    # 24 ranks have a map.
    scene.take(*simulated.hang(24, 2), after=200)
    scene.page.play(scene.model.full())
    scene.page.board().locator(".squares").press("ArrowDown")
    assert scene.texts("tip")
    seen["many ranks"] = look()
    fold = scene.page.board().locator("button.place.fold")
    assert fold.inner_text() == "23 ranks"
    fold.click()
    scene.page.play()
    assert fold.get_attribute("aria-expanded") == "true"
    seen["an open fold"] = look()
    scene.take(*two_groups())
    scene.page.board().get_by_role("tab", name="all").click()
    scene.page.play()
    assert scene.texts("wait-graph")
    seen["the tab of all groups"] = look()
    scene.button("Abort").click()
    assert scene.texts("what") == [
        "Abort 2 hung groups, 'columns' and 'rows', on 2 ranks?"
    ]
    seen["a question"] = look()
    scene.page.page.keyboard.press("Escape")
    scene.button("Timeline").click()
    scene.page.play(lanes(late=2, absent=2))
    scene.button("Statistics").click()
    scene.page.play()
    assert "all_reduce" in scene.texts("range")[0]
    seen["timeline"] = look()
    assert {name: one for name, one in seen.items() if one} == {}
    scene.close()


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_the_bar_of_a_cell_and_what_a_notebook_keeps(
    browser: Browser, theme: dict[str, str]
) -> None:
    scene = Scene(browser, width=600, theme=theme)
    scene.take(*two_groups())
    saved = board_html(scene.model, "14:03:12")
    saved = f"<div style='color:var(--jp-ui-font-color1)'>{saved}</div>"
    scene.page.page.evaluate(
        "html => document.body.insertAdjacentHTML('afterbegin', html)",
        hang_html("why", "the-board", "14:03:12", 7) + saved,
    )
    bar = scene.page.page.locator(".rankscope-hang")
    bar.get_by_role("button", name="Abort").click()
    assert bar.get_by_role("button", name="yes").is_visible()
    for place in (".rankscope-hang", ".rankscope-static"):
        assert faults(scene.page.page, place) == []
    scene.page.shot(f"saved-{'dark' if theme is DARK else 'light'}")
    scene.close()


def deadlock() -> Report:
    report = eight()
    (verdict,) = report.verdicts
    cycle = (Waiting((0,), "recv #1", "pp", (5,)), Waiting((5,), "recv #1", "pp", (0,)))
    verdict = replace(verdict, fault=Fault.DEADLOCK, cycle=cycle)
    return replace(report, verdicts=(verdict,))


@pytest.mark.parametrize(
    ("scheme", "width", "report"),
    [("light", 400, many), ("light", 1280, deadlock), ("dark", 400, deadlock)],
)
def test_the_report(
    browser: Browser,
    tmp_path: Path,
    scheme: Any,
    width: int,
    report: Callable[[], Report],
) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_page(report(), "dumps"), encoding="utf-8")
    page = browser.new_page(
        color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True
    )
    page.goto(path.as_uri())
    # Of many ranks: a list of them, and one of their processes.
    page.evaluate(
        "() => [...document.querySelectorAll('details')].slice(0, 4)"
        ".forEach((one) => { one.open = true; })"
    )
    assert faults(page) == []
    page.close()
