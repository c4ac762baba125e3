"""A real JupyterLab with a notebook in it, in headless Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, Locator, Page

from tests.waiting import until
from tests.widgets.bare_page import ARTIFACTS

__all__ = ["Lab", "Notebook", "lab"]

#: Milliseconds; the machine may be busy with other tests.
PATIENCE = 60_000

_QUIET = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}


class Notebook:
    """A notebook that is open in a page."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page = page
        self.file = file
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def cell(self, number: int) -> Locator:
        """The cell at a place, from 0."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def run(self, number: int) -> None:
        """Run a cell; return at once."""
        cell = self.cell(number)
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def is_running(self, number: int) -> bool:
        """Whether a cell runs, or waits to."""
        return "[*]" in self.cell(number).locator(".jp-InputPrompt").first.inner_text()

    def wait(self, number: int, timeout: float = PATIENCE / 1000) -> str:
        """Wait until a cell has ended; return its output as text."""
        try:
            until(lambda: self._has_run(number), timeout)
        except AssertionError:
            self.shot("failure")
            raise AssertionError(
                f"cell {number} did not end in {timeout:g} s: {self.output(number)!r}"
            ) from None
        return self.output(number)

    def _has_run(self, number: int) -> bool:
        prompt = self.cell(number).locator(".jp-InputPrompt").first.inner_text()
        return prompt.strip() not in ("[ ]:", "[*]:")

    def output(self, number: int) -> str:
        """What a cell has put out so far, as text."""
        return "\n".join(self.cell(number).locator(".jp-OutputArea").all_inner_texts())

    @property
    def board(self) -> Locator:
        """The live board."""
        return self.page.locator(".rankscope-live").first

    def shot(self, name: str) -> Path:
        """Take a picture of what is in sight."""
        ARTIFACTS.mkdir(exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        self.page.screenshot(path=str(path))
        return path

    def save(self) -> None:
        """Save the notebook, and wait until the file is there."""
        before = self.file.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        until(lambda: self.file.stat().st_mtime_ns != before, 30, "saved")


class Lab:
    """A server with a folder of its own; no token of it gets anywhere."""

    def __init__(self, folder: Path, browser: Browser) -> None:
        self.folder = folder
        self._browser = browser
        self._token = secrets.token_hex(16)
        (folder / "settings").mkdir()
        overrides = folder / "settings" / "overrides.json"
        overrides.write_text(json.dumps(_QUIET))
        runtime = folder / "runtime"
        environment = {
            **os.environ,
            "JUPYTER_RUNTIME_DIR": str(runtime),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_TOKEN": self._token,
        }
        self._log = (folder / "lab.log").open("wb")
        self._server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jupyterlab",
                "--no-browser",
                "--allow-root",
                "--ServerApp.port=0",
                f"--ServerApp.root_dir={folder}",
                f"--LabApp.app_settings_dir={folder / 'settings'}",
                f"--LabApp.user_settings_dir={folder / 'user'}",
                f"--LabApp.workspaces_dir={folder / 'workspaces'}",
                "--ServerApp.terminals_enabled=False",
                "--LanguageServerManager.autodetect=False",
            ],
            cwd=folder,
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        info = runtime / f"jpserver-{self._server.pid}.json"
        try:
            until(lambda: info.exists() or self._server.poll() is not None, 90)
            if self._server.poll() is not None:
                raise AssertionError((folder / "lab.log").read_text()[-3000:])
            self.url = json.loads(info.read_text())["url"]
        except BaseException:
            self.close()
            raise

    def open(
        self,
        name: str,
        cells: Sequence[str],
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
    ) -> Notebook:
        """Write a notebook and open it in a page of its own."""
        file = self.folder / f"{name}.ipynb"
        made = [nbformat.v4.new_code_cell(source) for source in cells]
        notebook = nbformat.v4.new_notebook(cells=made)
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python"}
        nbformat.write(notebook, file)
        return self.show(file, width=width, height=height, dark=dark)

    def show(
        self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> Notebook:
        """Open a notebook that is there."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, accept_downloads=True
        )
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(f"{self.url}doc/tree/{file.name}?token={self._token}")
        page.locator(".jp-Notebook .cm-content").first.wait_for()
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        if dark:
            page.evaluate(
                "() => window.jupyterapp?.commands.execute('apputils:change-theme',"
                " { theme: 'JupyterLab Dark' })"
            )
        return Notebook(page, file)

    def kernels(self) -> list[dict[str, str]]:
        """The kernels that run."""
        with urllib.request.urlopen(
            f"{self.url}api/kernels?token={self._token}", timeout=10
        ) as answer:
            return json.load(answer)

    def close(self) -> None:
        """End the server and its kernels."""
        self._server.send_signal(signal.SIGTERM)
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._log.close()


@contextlib.contextmanager
def lab(folder: Path, browser: Browser) -> Iterator[Lab]:
    """A JupyterLab that is gone afterwards."""
    server = Lab(folder, browser)
    try:
        yield server
    finally:
        server.close()
