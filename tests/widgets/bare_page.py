"""A page with nothing but boards in it, and a kernel that the test plays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from playwright.sync_api import (
    Browser,
    Error,
    Frame,
    Locator,
    Page,
    sync_playwright,
)

from rankscope.widgets.board import page as module
from rankscope.widgets.board.columns import COLUMNS

__all__ = ["ARTIFACTS", "DARK", "LIGHT", "BarePage", "chromium"]

#: Where screenshots go; not kept in the repository.
ARTIFACTS = Path(__file__).parents[2] / ".artifacts"

#: JupyterLab's variables as its themes set them.
LIGHT = {
    "--jp-ui-font-color1": "rgba(0, 0, 0, 0.87)",
    "--jp-ui-font-color2": "rgba(0, 0, 0, 0.54)",
    "--jp-border-color2": "#e0e0e0",
    "--jp-layout-color0": "white",
    "--jp-layout-color1": "white",
    "--jp-brand-color1": "#1976d2",
    "--jp-warn-color1": "#f57c00",
    "--jp-error-color1": "#d32f2f",
}
DARK = {
    "--jp-ui-font-color1": "rgba(255, 255, 255, 0.87)",
    "--jp-ui-font-color2": "rgba(255, 255, 255, 0.54)",
    "--jp-border-color2": "#424242",
    "--jp-layout-color0": "#111111",
    "--jp-layout-color1": "#212121",
    "--jp-brand-color1": "#2196f3",
    "--jp-warn-color1": "#ff9800",
    "--jp-error-color1": "#f44336",
}

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# A widget's model, as far as the board uses one: what the page sends is kept,
# and `play` brings it messages.
_MODEL = """
async (source, traits) => {
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const { default: widget } = await import(url);
  const listeners = {
    "msg:custom": new Set(), comm_live_update: new Set(), "change:pinned": new Set(),
    "change:hangs": new Set(), "change:snapshot": new Set(),
  };
  window.sent = [];
  const model = {
    get: (name) => traits[name],
    set: (name, value) => {
      traits[name] = value;
      call(`change:${name}`);
    },
    save_changes: () => window.sent.push({ traits: { pinned: traits.pinned } }),
    on: (event, callback) => listeners[event].add(callback),
    off: (event, callback) => listeners[event].delete(callback),
    send: (message) => window.sent.push(message),
  };
  const call = (event, what) => listeners[event].forEach((one) => one(what));
  window.hang = (hangs) => model.set("hangs", hangs);
  window.pin = (pinned) => model.set("pinned", pinned);
  window.play = (message) => call("msg:custom", message);
  window.restart = () => call("comm_live_update");
  window.leave = await widget.initialize({ model });
  window.show = (el) => widget.render({ model, el });
}
"""

# The pages of each browser that have no board. A new one, with a context and a process
# of its own, took three quarters of the CPU time of most tests.
_empty: WeakKeyDictionary[Browser, list[Page]] = WeakKeyDictionary()


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium: the system's, never one of Playwright's."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), headless=True, args=list(_FLAGS)
        )
        try:
            yield browser
        finally:
            browser.close()


class BarePage:
    """One board on an empty page of `width` px in a theme.

    `clock` makes the page's time the test's: ``page.clock`` moves it. `policy` is the
    page's content security policy; with `sandbox` the page is a frame in another one,
    with those rights. A tab that was closed is used again, but one with a clock, which
    it would keep.
    """

    def __init__(
        self,
        browser: Browser,
        width: int = 1000,
        height: int = 400,
        theme: dict[str, str] | None = None,
        snapshot: dict[str, Any] | None = None,
        home: str = "<div class='the-board'></div>",
        clock: bool = False,
        policy: str = "",
        sandbox: str | None = None,
    ) -> None:
        empty = [] if clock else _empty.setdefault(browser, [])
        self.page: Page = empty.pop() if empty else browser.new_page()
        self.page.set_viewport_size({"width": width, "height": height})
        self._again = None if clock else empty
        if clock:
            self.page.clock.install()
        self.page.set_default_timeout(60_000)
        self.errors: list[str] = []
        self.page.on("pageerror", self._on_error)
        style = ";".join(f"{k}:{v}" for k, v in (theme or LIGHT).items())
        meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        content = (
            f"<!doctype html>{meta if policy else ''}<body style='margin:12px;"
            f"background:var(--jp-layout-color0);{style}'>{home}</body>"
        )
        #: Where the board is: the page, or the frame in it.
        self.frame: Frame = self.page.main_frame
        if sandbox is None:
            self.page.set_content(content)
        else:
            self.page.set_content(
                f'<iframe sandbox="{sandbox}" width="{width}" height="{height}" '
                f'srcdoc="{escape(content, quote=True)}"></iframe>'
            )
            self.frame = self.page.frames[1]
            self.frame.wait_for_load_state()
        traits = {
            "name": "the-board",
            "columns": [asdict(column) for column in COLUMNS],
            "styles": module.styles(),
            "diagnoses": True,
            "pinned": False,
            "hangs": False,
            "snapshot": snapshot or {},
        }
        self.frame.evaluate(
            f"([source, traits]) => ({_MODEL})(source, traits)",
            [module.module(), traits],
        )

    def _on_error(self, error: Error) -> None:
        self.errors.append(str(error))

    def close(self) -> None:
        """End the board, and keep its page for another one."""
        if self._again is None:
            self.page.close()
            return
        self.page.remove_listener("pageerror", self._on_error)
        # A new document: with nothing of this board's, no focus and no timers.
        self.page.goto("about:blank")
        self.page.mouse.move(0, 0)
        self._again.append(self.page)

    def play(self, *messages: dict[str, Any] | None) -> None:
        """Have the kernel send messages; wait until they are drawn."""
        for message in messages:
            if message is not None:
                self.frame.evaluate(
                    "m => window.play(m)", json.loads(json.dumps(message))
                )
        self.frame.evaluate(
            "() => new Promise((done) => "
            "requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def board(self, place: int = 0) -> Locator:
        """A board on the page."""
        return self.frame.locator(".rankscope-live").nth(place)

    def rows(self) -> list[list[str]]:
        """The cells in sight of each row, titles first, all read in one go.

        One call into the page: a column that comes or goes between two calls would
        leave a cell that is waited for in vain.
        """
        return (
            self.board()
            .locator(".row")
            .evaluate_all(
                "rows => rows.map(row => [...row.querySelectorAll('.cell')]"
                ".filter(cell => cell.getClientRects().length)"
                ".map(cell => cell.innerText.trim()))"
            )
        )

    def sent(self) -> list[dict[str, Any]]:
        """What the page has sent to the kernel, since the last call."""
        return self.frame.evaluate("() => window.sent.splice(0)")

    def shot(self, name: str) -> Path:
        """Take a picture of the page."""
        ARTIFACTS.mkdir(exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        self.page.screenshot(path=str(path))
        return path
