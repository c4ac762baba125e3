"""Every text of the board can be read: 4.5:1 on the ground it stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.widgets import simulated, statuses
from tests.widgets.bare_page import DARK, LIGHT
from tests.widgets.scene import Scene, lanes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.processes

#: The least contrast of text by WCAG 2, level AA.
LEAST = 4.5

# Paints the grounds below each text, and the text's colour over them, on one pixel.
_CONTRASTS = """() => {
  const pen = document.createElement("canvas").getContext("2d", {
    willReadFrequently: true,
  });
  const paint = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of ["white", ...colours]) {
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
    }
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((byte) => {
      const part = byte / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const root = document.querySelector(".rankscope-live").shadowRoot;
  const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walk.nextNode()) {
    const at = walk.currentNode.parentElement;
    const text = walk.currentNode.data.trim();
    if (!text || at.tagName === "STYLE" || !at.checkVisibility()) continue;
    const grounds = [];
    let opacity = 1;
    for (let one = at; one; one = one.parentElement ?? one.getRootNode().host) {
      grounds.unshift(getComputedStyle(one).backgroundColor);
      opacity *= getComputedStyle(one).opacity;
    }
    const ground = paint(grounds);
    const ink = paint([...grounds, getComputedStyle(at).color]);
    const [dark, light] = [ground, ink].sort((a, b) => a - b);
    found.push([text, opacity < 1 ? 0 : (light + 0.05) / (dark + 0.05)]);
  }
  return found;
}"""


def _hang(scene: Scene) -> None:
    scene.take(*simulated.hang(4, 2))
    scene.take(*simulated.hang(4, 2), after=1.5)
    scene.button("Timeline").click()
    scene.page.play(lanes(late=2, absent=2))


def _death(scene: Scene) -> None:
    dead = statuses.rank(3, statuses.group(), state="dead", reason="killed")
    scene.take(statuses.cluster(dead))


def _silence(scene: Scene) -> None:
    silent = statuses.rank(1, statuses.group(), heartbeat_age=4.0)
    scene.take(statuses.cluster(silent))


def _has_shapes(scene: Scene) -> None:
    """States that have a form and a colour keep them where the user has few colours."""
    page = scene.page.page
    grounds = (
        "all => new Set(all.map(one => getComputedStyle(one).backgroundColor)).size"
    )
    shapes = scene.page.board().locator(".legend i, .tab .shape")
    usual = shapes.evaluate_all(grounds)
    page.emulate_media(forced_colors="active")
    assert shapes.evaluate_all(grounds) == usual > 3
    page.emulate_media(forced_colors="none", media="print")
    banner = scene.page.board().locator(".banner")
    exact = "one => getComputedStyle(one).printColorAdjust"
    assert banner.evaluate(exact) == "exact"
    page.emulate_media(media="screen")


def _kernel_gone(scene: Scene) -> None:
    scene.page.page.evaluate("() => window.restart()")
    scene.page.play()


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_text_can_be_read(browser: Browser, theme: dict[str, str]) -> None:
    scene = Scene(browser, width=1280, height=700, theme=theme)
    seen: set[str] = set()
    for happens in (_hang, _death, _silence, _kernel_gone):
        happens(scene)
        contrasts = scene.page.page.evaluate(_CONTRASTS)
        weak = [(text, round(ratio, 2)) for text, ratio in contrasts if ratio < LEAST]
        assert weak == [], happens.__name__
        seen |= {text for text, _ in contrasts}
        if happens is _hang:
            _has_shapes(scene)
    assert {"not entered", "Diagnose", "seq", "No kernel"} <= seen
    scene.close()
