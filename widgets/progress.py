"""ProgressLine: one line with the present step, and the result in the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from rankscope.backends.thread_start import start_thread

from .display_id import new_display_id
from .units import bandwidth_text, bytes_text

__all__ = ["ProgressLine"]

#: Seconds after which a transfer is shown, and the characters of its bar.
PATIENCE, BAR = 1.0, 24
#: Seconds between two looks at a step that takes long.
TICK = 1.0


class ProgressLine:
    """A line of text that changes in place.

    In a notebook the line is a display that is updated, so that a saved notebook has
    the last text only; in a terminal it is overwritten; elsewhere only the last text
    is printed. Without a call of `done` it is removed at the end. Within ``with`` a
    step that takes long has its seconds behind it.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._publisher = shell.display_pub
        captured = isinstance(self._publisher, CapturingDisplayPublisher)
        self._updates = getattr(shell, "kernel", None) is not None and not captured
        self._overwrites = not self._updates and sys.stdout.isatty()
        self._display_id = new_display_id()
        self._shown = False
        self._done = False
        self._showing = threading.Lock()
        self._ended = threading.Event()
        # The present step, and since when.
        self._step = "", 0.0

    def update(self, text: str) -> None:
        """Show `text` in place of the text before."""
        with self._showing:
            self._step = text, time.monotonic()
            self._show(text)

    def _show(self, text: str) -> None:
        if self._updates:
            self._publisher.publish(
                {"text/plain": text},
                transient={"display_id": self._display_id},
                update=self._shown,
            )
            self._shown = True
        elif self._overwrites:
            print(f"\r\x1b[2K{text}", end="", flush=True)
            self._shown = True

    def transfer(self, what: str) -> Callable[[int, int], None]:
        """Return a function that shows a bar, of the bytes that have gone and of all.

        What is over within a second is not shown.
        """
        began = time.monotonic()

        def show(moved: int, total: int) -> None:
            seconds = time.monotonic() - began
            if seconds < PATIENCE or not total:
                return
            bar = ("█" * (BAR * moved // total)).ljust(BAR, "░")
            speed = bandwidth_text(moved / seconds / 1e9)
            of = f"{bytes_text(moved)} of {bytes_text(total)}"
            self.update(f"{what}  {bar}  {of} · {speed}")

        return show

    def done(self, text: str) -> None:
        """Show `text` for good."""
        self._done = True
        self._ended.set()
        self.update(text)
        if not self._updates:
            print("" if self._overwrites else text, flush=True)

    def _count(self) -> None:
        """Show how long the present step takes, on a thread, until the end."""
        while not self._ended.wait(TICK):
            with self._showing:
                text, since = self._step
                seconds = time.monotonic() - since
                if text and not self._ended.is_set() and seconds >= PATIENCE:
                    self._show(f"{text} ({seconds:.0f} s)")

    def __enter__(self) -> ProgressLine:
        if self._updates or self._overwrites:
            start_thread("progress", self._count)
        return self

    def __exit__(self, *error: object) -> None:
        with self._showing:
            self._ended.set()
        if self._shown and not self._done:
            self.update("")
