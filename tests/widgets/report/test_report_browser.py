"""The page of a report in Chromium: narrow and wide, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.widgets.report.page import report_page
from tests.widgets.report.report_scenes import eight, many

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.processes

pytest.importorskip("playwright")

#: The contrast of each text with the ground that it is on, and the text.
_CONTRASTS = """
() => {
  const canvas = document.createElement("canvas").getContext(
    "2d", { willReadFrequently: true });
  const colour = (value) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = value;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((one) => one / 255)
      .map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = colour(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some(
      (one) => one.nodeType === 3 && one.textContent.trim());
    if (!own || !node.getClientRects().length) continue;
    const pair = [colour(getComputedStyle(node).color), ground(node)].map(light);
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    found.push([ratio, node.textContent.slice(0, 40)]);
  }
  return found.sort((one, other) => one[0] - other[0]);
}
"""


@pytest.fixture(scope="module")
def browser() -> Any:
    from tests.widgets.bare_page import chromium

    with chromium() as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page(browser: Browser, tmp_path: Path, scheme: Any, width: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_page((eight if width < 800 else many)(), "dumps"))
    page = browser.new_page(
        viewport={"width": width, "height": 800}, color_scheme=scheme
    )
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(path.as_uri())
        assert page.title() == "Rankscope report: dumps"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        lowest = page.evaluate(_CONTRASTS)[0]
        assert lowest[0] >= 4.5, lowest
        if width > 800:
            page.get_by_role("button", name="Unfold all").click()
            assert page.locator("details:not([open])").count() == 0
    finally:
        page.close()
    assert said == []
    assert asked == [path.as_uri()]
