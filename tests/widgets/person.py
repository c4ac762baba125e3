"""Somebody with a notebook in front of them, who looks at the board and clicks."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from rankscope.backends.conformance.waiting import until
from tests.widgets.bare_page import ARTIFACTS
from tests.widgets.clicks import click_yes

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.widgets.lab import Notebook

__all__ = ["Person"]


class Person:
    """Runs cells, reads the board and uses its buttons; `name` is in the pictures."""

    def __init__(self, notebook: Notebook, name: str) -> None:
        self.notebook = notebook
        self.name = name
        self.began = 0.0

    # -- cells ----------------------------------------------------------------

    def run(self, cell: str) -> None:
        """Run a cell and look at the board, which draws nothing out of sight."""
        self.began = time.monotonic()
        self.notebook.run(cell)
        self.notebook.look_at_board()

    def finish(self, cell: str) -> str:
        """Run a cell to its end; return its output."""
        self.run(cell)
        return self.notebook.wait(cell)

    # -- the board --------------------------------------------------------------

    def texts(self, name: str) -> list[str]:
        """The texts of the board's elements of a class."""
        return self.notebook.board.locator(f".{name}").all_inner_texts()

    def column(self, name: str) -> list[str]:
        """What each rank's row says in a column."""
        return [text.strip() for text in self.texts(f"c-{name}")[1:]]

    def button(self, name: str) -> Locator:
        """A button of the board by what it says."""
        return self.notebook.board.get_by_role("button", name=name, exact=True)

    def banner(self, pattern: str, timeout: float = 60) -> str:
        """Wait until the banner says something; return it."""

        def said() -> str:
            text = " ".join(self.texts("banner"))
            return text if re.search(pattern, text, re.DOTALL) else ""

        try:
            return until(said, timeout)
        except AssertionError:
            self.shot("failure")
            raise AssertionError(f"{pattern!r} is not in {self.texts('banner')}") from (
                None
            )

    def verdict(self, pattern: str) -> str:
        """Wait for a verdict on the cell that runs; note how long it took."""
        said = self.banner(pattern)
        self.note("hang to verdict", self.began)
        return said

    def confirm(self, name: str) -> float:
        """Click a button and its *yes*; return when that was clicked."""
        self.button(name).click()
        yes = self.button("yes")
        yes.wait_for()
        return click_yes(yes, 60)

    def abort(self, cell: str) -> str:
        """Abort; wait for the cell's end; return its output, in one line."""
        clicked = self.confirm("Abort")
        output = " ".join(self.notebook.wait(cell).split())
        self.note("click to the cell's end", clicked)
        return output

    def rebuild(self) -> None:
        """Click Rebuild; wait until the ranks can go on."""
        self.button("Rebuild").click()
        self.banner("^Idle")

    # -- records ------------------------------------------------------------------

    def shot(self, name: str) -> None:
        """Take a picture with the board in sight."""
        self.notebook.look_at_board()
        self.notebook.shot(f"board-{self.name}-{name}")

    def note(self, what: str, since: float) -> None:
        """Print, and keep beside the pictures, how long something took."""
        line = f"{self.name}: {what}: {time.monotonic() - since:.2f} s"
        ARTIFACTS.mkdir(exist_ok=True)
        print(line)
        with (ARTIFACTS / "board-times.txt").open("a", encoding="utf-8") as file:
            print(line, file=file)
