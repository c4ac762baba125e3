"""A real JupyterLab or Notebook 7 with a notebook in it, in headless Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Locator, Page

from rankscope.backends.conformance.waiting import until
from tests.widgets.bare_page import ARTIFACTS
from tools import kernelspec

__all__ = ["FrontEnd", "Lab", "Notebook", "lab"]

FrontEnd = Literal["lab", "notebook"]

#: Milliseconds; the machine may be busy with other tests.
PATIENCE = 120_000

_MODULES: dict[FrontEnd, str] = {"lab": "jupyterlab", "notebook": "notebook"}

#: ``python -m`` for a server, without the checker that `tools` goes without: of 5 s of
#: CPU until JupyterLab is imported 3.
_SERVE = """
import runpy, sys
sys.modules["rfc3987_syntax"] = None
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_PAGES: dict[FrontEnd, str] = {"lab": "doc/tree", "notebook": "notebooks"}

_THEMES = "@jupyterlab/apputils-extension:themes"

#: What no test looks at: a fifth of the time that JupyterLab takes to open. For the
#: formats of the export the server imports nbconvert, more than a second of CPU.
_DISABLED = (
    *("audio", "console", "csvviewer", "extensionmanager", "help"),
    *("htmlviewer", "hub", "imageviewer", "inspector", "launcher", "logconsole"),
    *("lsp", "markdownviewer", "mermaid", "pdf", "pluginmanager"),
    *("notebook:export", "notebook:update-raw-mimetype", "settingeditor"),
    *("terminal", "tooltip", "vega5", "video"),
)

_SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
    # Every cell is on the page, whether it is in sight or not.
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}


#: The 2 s after which anywidget drops the messages of a model are over before the model
#: begins: no timer, which a model that begins quickly may beat.
_NO_PATIENCE = """
const timeout = AbortSignal.timeout.bind(AbortSignal);
const over = { addEventListener: (_, listener) => listener() };
AbortSignal.timeout = (ms) => (ms === 2000 ? over : timeout(ms));
"""


class Notebook:
    """A notebook that is open in a page; its cells go by their ids."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page = page
        self.file = file
        self.errors: list[str] = []
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        self._places = {cell["id"]: place for place, cell in enumerate(cells)}
        page.on(
            "pageerror", lambda error: self.errors.append(error.stack or str(error))
        )

    def cell(self, name: str) -> Locator:
        """The cell with an id."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(self._places[name])

    def _prompt(self, name: str) -> str:
        prompt = self.cell(name).locator(".jp-InputPrompt").first
        return prompt.inner_text().strip()

    def run(self, name: str) -> None:
        """Run a cell; return at once."""
        before = self._prompt(name)
        code = self.cell(name).locator(".cm-content")

        def begun() -> bool:
            # A page that is still settling takes the focus away, and the key.
            code.click()
            code.press("Control+Enter")
            try:
                return until(lambda: self._prompt(name) != before, 5)
            except AssertionError:
                return False

        until(begun, PATIENCE / 1000, f"cell {name!r} runs")

    def is_running(self, name: str) -> bool:
        """Whether a cell runs, or waits to."""
        return self._prompt(name) == "[*]:"

    def wait(self, name: str, timeout: float = PATIENCE / 1000) -> str:
        """Wait until a cell has ended; return its output as text."""
        try:
            until(lambda: self._prompt(name) not in ("[ ]:", "[*]:"), timeout)
        except AssertionError:
            self.shot(f"failure-{name}")
            raise AssertionError(
                f"cell {name!r} did not end in {timeout:g} s: {self.output(name)!r}"
            ) from None
        return self.output(name)

    def output(self, name: str) -> str:
        """What a cell has put out so far, as text."""
        return "\n".join(self.cell(name).locator(".jp-OutputArea").all_inner_texts())

    @property
    def board(self) -> Locator:
        """The live board."""
        return self.page.locator(".rankscope-live").first

    def look_at_board(self) -> None:
        """Scroll to the live board, if there is one."""
        # At once: a board may change its place in the page at any moment.
        self.page.evaluate(
            "() => document.querySelector('.rankscope-live')"
            "?.scrollIntoView({ block: 'center' })"
        )

    def shot(self, name: str) -> Path:
        """Take a picture of what is in sight."""
        ARTIFACTS.mkdir(exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        self.page.screenshot(path=str(path))
        return path

    def reload(self) -> None:
        """Load the page again, as it was saved last."""
        self.page.reload()
        self.page.locator(".jp-CodeCell .cm-content").first.wait_for()

    def restart_kernel(self) -> None:
        """Restart the kernel, as the button of the toolbar does."""
        self.page.locator("[data-command='notebook:restart-kernel']").first.click()
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    def save(self) -> None:
        """Save the notebook, and wait until the file is there."""
        before = self.file.stat().st_mtime_ns
        self.page.locator("[data-command='docmanager:save']").first.click()

        def saved() -> bool:
            # First: what is read before the writing begins is the old notebook.
            if self.file.stat().st_mtime_ns == before:
                return False
            try:
                json.loads(self.file.read_text(encoding="utf-8"))
            except ValueError:
                # It is being written.
                return False
            return True

        until(saved, PATIENCE / 1000, "saved")


class Lab:
    """A server with a folder of its own; no token of it gets anywhere.

    `python` is what the server runs on; `dark` chooses the theme of its pages. Beside
    its own kernels there are those of the Pythons `kernels`.
    """

    def __init__(
        self,
        folder: Path,
        browser: Browser,
        front_end: FrontEnd = "lab",
        python: str = sys.executable,
        dark: bool = False,
        kernels: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        # Of one person: what a page has compiled, the next one has, too.
        self._context = browser.new_context(accept_downloads=True)
        self.front_end: FrontEnd = front_end
        self._token = secrets.token_hex(16)
        (folder / "settings").mkdir()
        overrides = folder / "settings" / "overrides.json"
        disabled = {_extension(one): True for one in _DISABLED}
        (folder / "settings" / "page_config.json").write_text(
            json.dumps({"disabledExtensions": disabled})
        )
        theme = f"JupyterLab {'Dark' if dark else 'Light'}"
        overrides.write_text(json.dumps({**_SETTINGS, _THEMES: {"theme": theme}}))
        runtime = folder / "runtime"
        environment = {
            **os.environ,
            "JUPYTER_RUNTIME_DIR": str(runtime),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_TOKEN": self._token,
        }
        # Before it starts: the server does not look again.
        for one in {python, sys.executable, *kernels}:
            kernelspec.write(folder / "data", _kernel(one), one)
        self._log = (folder / "server.log").open("wb")
        self._server = subprocess.Popen(
            [
                python,
                "-c",
                _SERVE,
                _MODULES[front_end],
                "--no-browser",
                "--allow-root",
                "--ServerApp.port=0",
                f"--ServerApp.root_dir={folder}",
                f"--LabApp.app_settings_dir={folder / 'settings'}",
                f"--LabApp.user_settings_dir={folder / 'user'}",
                f"--LabApp.workspaces_dir={folder / 'workspaces'}",
                f"--JupyterNotebookApp.app_settings_dir={folder / 'settings'}",
                f"--JupyterNotebookApp.user_settings_dir={folder / 'user'}",
                f"--JupyterNotebookApp.workspaces_dir={folder / 'workspaces'}",
                "--ServerApp.terminals_enabled=False",
                "--LanguageServerManager.autodetect=False",
            ],
            cwd=folder,
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        info = runtime / f"jpserver-{self._server.pid}.json"

        def url() -> str | None:
            """Return the server's address; ``None`` before the file is complete."""
            if self._server.poll() is not None:
                raise AssertionError((folder / "server.log").read_text()[-3000:])
            try:
                return str(json.loads(info.read_text(encoding="utf-8"))["url"])
            except (FileNotFoundError, ValueError):
                return None

        try:
            self.url = until(url, PATIENCE / 1000)
        except BaseException:
            self.close()
            raise

    def open(
        self,
        notebook: Path,
        *,
        python: str = sys.executable,
        width: int = 1280,
        height: int = 900,
        alone: bool = True,
        patience: int | None = None,
    ) -> Notebook:
        """Open a copy of a notebook in a page of its own, with a kernel of `python`.

        Its cell ``patience`` sets the deadline of the cells that hang, in seconds.
        """
        content = json.loads(notebook.read_text(encoding="utf-8"))
        if patience is not None:
            (cell,) = (one for one in content["cells"] if one["id"] == "patience")
            cell["source"] = f"patience = {patience}"
        name = _kernel(python)
        content["metadata"]["kernelspec"] = {"name": name, "display_name": name}
        file = self.folder / f"{notebook.stem}-{name}.ipynb"
        file.write_text(json.dumps(content), encoding="utf-8")
        return self.show(file, width=width, height=height, alone=alone)

    def show(
        self,
        file: Path,
        *,
        width: int = 1280,
        height: int = 900,
        idle: bool = True,
        alone: bool = True,
        busy: bool = False,
    ) -> Notebook:
        """Open a notebook that is in the server's folder.

        Where its kernel runs a cell, `idle` is false: the page does not wait for it.
        Unless `alone`, JupyterLab has panels beside the notebook. In a `busy` page
        anywidget has given each of its models up before it begins.
        """
        page = self._context.new_page()
        if busy:
            page.add_init_script(_NO_PATIENCE)
        page.set_viewport_size({"width": width, "height": height})
        page.set_default_timeout(PATIENCE)
        where = f"{_PAGES[self.front_end] if alone else 'lab/tree'}/{file.name}"
        page.goto(f"{self.url}{where}?token={self._token}")
        page.locator(".jp-CodeCell .cm-content").first.wait_for()
        # Who runs a cell before there is a kernel is asked for one.
        page.locator(".jp-KernelName", has_not_text="No Kernel").wait_for()
        if idle:
            page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        return Notebook(page, file)

    def close(self) -> None:
        """End the server and its kernels."""
        self._context.close()
        self._server.send_signal(signal.SIGTERM)
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._log.close()


def _extension(name: str) -> str:
    """The id of an extension, or of the part of one that is named behind a colon."""
    package, _, part = name.partition(":")
    return f"@jupyterlab/{package}-extension" + (f":{part}" if part else "")


def _kernel(python: str) -> str:
    """The name of a Python's kernel: that of its environment."""
    return Path(python).parents[1].name.strip(".")


@contextlib.contextmanager
def lab(
    folder: Path,
    browser: Browser,
    front_end: FrontEnd = "lab",
    python: str = sys.executable,
    dark: bool = False,
    kernels: Sequence[str] = (),
) -> Iterator[Lab]:
    """A JupyterLab or Notebook that is gone afterwards."""
    found = Lab(folder, browser, front_end, python, dark, kernels)
    try:
        yield found
    finally:
        found.close()
