"""Board: the live board of a cluster in a notebook, as a widget."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import anywidget
import traitlets
from IPython.core.displaypub import CapturingDisplayPublisher, DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from rankscope.backends.observe.verdicts import Verdict
from rankscope.engines import Cluster, Job
from rankscope.engines.wire.ipykernel_private import serve_messages

from ..absence_graph import picture_of
from . import page
from .actions import BoardActions
from .columns import COLUMNS
from .dock import Dock
from .feed import BoardFeed
from .html import board_html, hang_html
from .model import Message
from .text import board_text

__all__ = ["Board"]

_VIEW = "application/vnd.jupyter.widget-view+json"

#: The answer to `Board.pin` in VS Code and Colab.
NO_BAR = (
    "There is no bar here: this front end shows each widget in a frame of its own, "
    "which scrolls away with its cell. rankscope abort in a terminal ends a hang from "
    "wherever the notebook is scrolled to."
)


class Board(anywidget.AnyWidget):
    """Shows the state of every rank of `cluster` live, with buttons to end a hang.

    The button Diagnose calls ``diagnose()``; without `diagnose` there is no button. A
    page that opens calls ``note_letters(count)`` with the letters of a line there.
    The cluster's own threads update the board, so that updates continue while a
    cell blocks the kernel's main thread. The buttons work then too, where the front
    end opens subshells or the cell calls `serve_messages`. Every method may be
    called from any thread. While no page shows the board, no thread of it runs.

    In JupyterLab and Notebook the output of a cell is HTML with the last state, and
    the page puts the live board in its place: a saved notebook shows the HTML. (The
    output of a widget would be "model not found" there.) Front ends that separate
    HTML from widgets (VS Code, Colab) get an ordinary widget.
    """

    _esm = page.module()
    #: The CSS class of the elements of a page that the board is put into.
    name = traitlets.Unicode().tag(sync=True)
    columns: Any = traitlets.List().tag(sync=True)
    styles = traitlets.Unicode().tag(sync=True)
    #: Whether there is a button Diagnose.
    diagnoses = traitlets.Bool().tag(sync=True)
    #: Whether a bar in the page shows state, verdict and Abort, where no panel does.
    pinned = traitlets.Bool().tag(sync=True)
    #: Whether a cell hangs: such a bar is there where nothing of the board is in sight.
    hangs = traitlets.Bool().tag(sync=True)
    #: The whole state, for a page that opens; changes are sent as messages.
    snapshot = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        cluster: Cluster | Job,
        shell: InteractiveShell,
        diagnose: Callable[[], Sequence[Verdict]] | None = None,
        pinned: bool = False,
        note_letters: Callable[[int], None] = lambda letters: None,
    ) -> None:
        self._note_letters = note_letters
        self._cluster = cluster
        self._shell = shell
        self._kernel = shell.kernel  # type: ignore[attr-defined]
        self._outputs: list[tuple[DisplayPublisher, str]] = []
        self._closing = threading.Lock()
        self._dock = Dock(self._bundle)
        # A cell makes the board: until it ends, messages of pages may be delayed.
        self._cell_running = True
        self._feed = BoardFeed(
            *(cluster, self._send_to_pages, self._update_outputs),
            lambda: self._cell_running,
        )
        self._actions = BoardActions(
            cluster,
            diagnose=diagnose,
            send=self._send_to_pages,
            get_model=lambda: self._feed.model,
            show_verdicts=self._feed.show_verdicts,
            on_done=self._feed.refresh_soon,
            source_line=self._source_line,
        )
        super().__init__(
            name=f"rankscope-board-{uuid.uuid4().hex}",
            columns=[asdict(column) for column in COLUMNS],
            styles=page.styles(),
            diagnoses=diagnose is not None,
            pinned=pinned and not self._needs_view(),
        )
        self.on_msg(self._on_page_message)
        events: Any = shell.events
        events.register("pre_run_cell", self._on_cell_start)
        events.register("post_run_cell", self._on_cell_end)

    # -- calls of the magics -----------------------------------------------

    def show_verdicts(self, verdicts: Iterable[Verdict]) -> None:
        """Show the verdicts of a diagnosis; ``[]``: nothing is wrong."""
        found = tuple(verdicts)
        if not found:
            self.hangs = False
        self._feed.show_verdicts(found)

    def show(self) -> None:
        """Show the board below the cell that runs, in addition to other places."""
        publisher = self._shell.display_pub
        display_id = f"{self.name}-{len(self._outputs)}"
        publisher.publish(self._bundle(), transient={"display_id": display_id})
        if not isinstance(publisher, CapturingDisplayPublisher):
            self._outputs.append((publisher, display_id))

    def pin(self, pinned: bool) -> None:
        """Keep the board in sight, docked if possible, else as a bar; or no more."""
        if pinned and self._needs_view():
            print(NO_BAR)
            return
        # Also where it is pinned: the user may have closed the panel.
        self._dock.close()
        if pinned:
            self._dock.open()
        self.pinned = pinned

    def close(self) -> None:
        """End the board; its outputs keep the last state."""
        with self._closing:
            if self.comm is None:
                return
            self._feed.close()
            events: Any = self._shell.events
            events.unregister("pre_run_cell", self._on_cell_start)
            events.unregister("post_run_cell", self._on_cell_end)
            self._dock.close()
            self._update_outputs()
            super().close()

    def serve_messages(self) -> None:
        """Handle clicks that wait for the main thread; to be called on that thread."""
        if self.comm is not None:
            serve_messages(self._kernel, {self.model_id})

    @property
    def running(self) -> bool:
        """Whether a page shows the board, so that its thread runs."""
        return self._feed.running

    # -- the page ---------------------------------------------------------------

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the traits as ipywidgets sends them, with the present state."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if "snapshot" in state:
            state["snapshot"] = self._feed.full()
        return state

    def _send_to_pages(self, message: Message) -> None:
        if self.comm is not None:
            self.send(message)

    def _on_page_message(self, widget: Any, message: Any, buffers: Any) -> None:
        """Handle a message of a page, on the thread that serves its messages."""
        if not isinstance(message, dict):
            return
        if "watch" in message:
            self._dock.note_page(str(message["watch"]), message.get("shell"))
            if isinstance(letters := message.get("letters"), int):
                self._note_letters(letters)
            if self.pinned:
                self._dock.open()
            self._feed.watch(str(message["watch"]))
        elif "unwatch" in message:
            self._dock.note_page(str(message["unwatch"]), None)
            self._feed.unwatch(str(message["unwatch"]))
        elif "sync" in message:
            self._feed.send_full()
        elif "do" in message:
            self._actions.start(message)

    @traitlets.observe("pinned")
    def _on_pinned(self, change: Any) -> None:
        # The page has a button Unpin.
        if not change.new:
            self._dock.close()

    # -- the cells of the notebook --------------------------------------------------

    def _on_cell_start(self, info: Any) -> None:
        self._cell_running = True

    def _on_cell_end(self, result: Any) -> None:
        self._cell_running = self.hangs = False
        if self._cluster.closed and not self._feed.closed:
            # By a call in the cell: no page may show the board, and no magic follow.
            self._feed.close()
            self._update_outputs()
        elif self._outputs and not self._needs_view():
            self._feed.report_end()

    def _source_line(self, cell: int, line: int) -> str:
        """Return line `line` of the notebook's cell `cell`, ``""`` if it is unknown."""
        history = self._shell.history_manager
        cells = history.input_hist_raw if history is not None else []
        lines = cells[cell].splitlines() if 0 < cell < len(cells) else []
        return lines[line - 1] if 0 < line <= len(lines) else ""

    # -- outputs ------------------------------------------------------------------

    def _bundle(self) -> dict[str, Any]:
        """Return the state as text and as HTML, whose place the live board takes."""
        when = time.strftime("%H:%M:%S")
        text, html = self._feed.read(
            lambda model: (board_text(model), board_html(model, when, self.name))
        )
        bundle: dict[str, Any] = {"text/plain": text, "text/html": html}
        if self._needs_view():
            bundle[_VIEW] = {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.model_id,
            }
        return bundle

    def hang_html(self, text: str, verdict: Verdict, when: str) -> str:
        """Return why a cell hangs as HTML, which the page puts a bar into.

        `when` is the time at which it was found.
        """
        self.hangs = not self._needs_view()
        if not self.hangs:
            text += " (`rankscope abort` in a terminal ends it)"
        return hang_html(
            text,
            self.name,
            when,
            # Not that of the shell, which newer IPythons have counted up already.
            self._shell.displayhook.prompt_count,
            picture_of(verdict),
            bool(verdict.cycle),
        )

    def _needs_view(self) -> bool:
        """Return whether the front end can show the board only as a widget's view."""
        return (
            "__vsc_ipynb_file__" in self._shell.user_ns or "google.colab" in sys.modules
        )

    def _update_outputs(self) -> None:
        """Put the present state into the outputs, so that a save keeps it."""
        if not self._outputs or self._needs_view():
            return
        bundle = self._bundle()
        for publisher, display_id in self._outputs:
            publisher.publish(bundle, transient={"display_id": display_id}, update=True)

    def _ipython_display_(self) -> None:
        self.show()

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict, dict]:
        return self._bundle(), {}
