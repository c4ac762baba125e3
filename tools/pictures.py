"""Take the pictures of the docs: ``python -m tools.pictures``.

The board at each verdict, of ranks that are made up (`tests.widgets.board.gallery`),
a JupyterLab whose cell hangs and ``rankscope top`` with a late rank, of real ranks, and
the page of a dead job's report. The files go to ``docs/_static``.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
from rankscope.terminal import running
from rankscope.widgets.report.page import report_page
from rankscope.widgets.top.app import TopApp
from tests.widgets.bare_page import chromium
from tests.widgets.board import gallery
from tests.widgets.lab import lab
from tests.widgets.person import Person
from tests.widgets.report import report_scenes
from tools import kernelspec

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["take_hang", "take_report", "take_top"]

#: The cells of the notebook in the picture, by their ids.
CELLS = {
    "init": "%load_ext rankscope\n%dist_init -n 4",
    "hang": (
        "%%distributed\n"
        "gradients = np.full(1_000_000, rank, dtype=np.float32)\n"
        "if rank != 2:  # a condition that is not true on every rank\n"
        "    dist.all_reduce(gradients)"
    ),
}
#: In pixels.
_WIDTH, _HEIGHT = 1000, 600
_REPORT_HEIGHT = 780
#: In columns and lines.
_TERMINAL = 118, 12
#: The cell of the ranks in the terminal's picture.
LATE = """\
import time
gradients = np.ones(1_000_000, np.float32)
def next_batch():
    if rank == 2:
        time.sleep(0.04)  # reads from a slow disk
while True:
    next_batch()
    dist.all_reduce(gradients)
"""
_COLOURS = 128


def take_hang(browser: Browser, path: Path) -> None:
    """Save a picture of a JupyterLab in which a cell hangs, with the verdict on it."""
    cells = [nbformat.v4.new_code_cell(code, id=name) for name, code in CELLS.items()]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    with tempfile.TemporaryDirectory(prefix="rankscope-") as name:
        folder = Path(name)
        kernelspec.write(folder / "data")
        file = folder / "training.ipynb"
        nbformat.write(notebook, file)
        with lab(folder, browser) as server:
            shown = server.show(file, width=_WIDTH, height=_HEIGHT)
            # The banner has its colour at once.
            shown.page.emulate_media(reduced_motion="reduce")
            person = Person(shown, "picture")
            person.finish("init")
            person.run("hang")
            person.verdict("^Missing ranks")
            shown.page.locator(".rankscope-hang").wait_for()
            shown.page.mouse.move(0, 0)
            taken = shown.page.screenshot()
            gallery.reduced(taken, _COLOURS).save(path, optimize=True)
            person.abort("hang")


def take_report(browser: Browser, path: Path) -> None:
    """Save a picture of the page of a report, its upper part."""
    page = browser.new_page(viewport={"width": _WIDTH, "height": _REPORT_HEIGHT})
    facts = ("made 2026-11-25 08:12:00 UTC",)
    page.set_content(report_page(report_scenes.eight(), "job", facts))
    gallery.reduced(page.screenshot(), _COLOURS).save(path, optimize=True)
    page.close()


def take_top(path: Path) -> None:
    """Save a picture of ``rankscope top``, where a rank keeps the others waiting.

    Not beside a browser, whose event loop runs on this thread, too.
    """
    with Cluster(4) as cluster:
        cell = cluster.execute(LATE)
        (there,) = (one for one in running() if one.name == cluster.cluster_id)
        app = TopApp(there.name, there.attach)
        drawn = asyncio.run(_drawn(app))
        app.close()
        cluster.interrupt()
        cell.wait(60)
    with chromium() as browser:
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        page.set_content(f"<body style='margin: 0'>{drawn}")
        taken = page.locator("svg").screenshot()
        gallery.reduced(taken, _COLOURS).save(path, optimize=True)


async def _drawn(app: TopApp) -> str:
    async with app.run_test(size=_TERMINAL) as pilot:
        await asyncio.to_thread(until, lambda: _says_where(app), 120, "the advice")
        await pilot.pause(app._interval)
        drawn = app.export_screenshot()
        app.exit()
    return drawn


def _says_where(app: TopApp) -> bool:
    return app.state is not None and "meanwhile" in " ".join(
        app.state["banner"]["more"]
    )


def main() -> None:
    with chromium() as browser:
        gallery.take(browser)
        take_hang(browser, gallery.file_of("hang"))
        take_report(browser, gallery.PICTURES / "report.png")
    take_top(gallery.PICTURES / "top.png")


if __name__ == "__main__":
    main()
