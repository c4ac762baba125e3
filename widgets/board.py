"""Board: the live board of a cluster, in a notebook."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anywidget
import traitlets
from IPython.core.displaypub import CapturingDisplayPublisher, DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from rankscope.backends.diagnosis import Verdict
from rankscope.engines import Cluster

from . import page
from .board_actions import BoardActions
from .board_columns import COLUMNS
from .board_feed import BoardFeed
from .board_html import board_html
from .board_model import Message
from .board_text import board_text
from .serve import serve_messages

__all__ = ["Board"]

_VIEW = "application/vnd.jupyter.widget-view+json"


class Board(anywidget.AnyWidget):
    """What every rank of `cluster` is doing, as it changes, and how to end it.

    ``diagnose()`` is what the button Diagnose calls; without it there is none.
    It is fed from the cluster's own threads, so it goes on while a cell blocks
    the kernel's main thread; its buttons work then too, wherever the front end
    or `serve_messages` has clicks handled. Every method may be called from any
    thread. While no page shows it, it does nothing.

    In JupyterLab and Notebook an output is HTML with the state that was last,
    and the page shows the live board in its place: once saved, the HTML is what
    remains. A widget's output would say "model not found" there. Front ends
    that keep HTML and widgets apart (VS Code, Colab) get an ordinary widget.
    """

    _esm = page.module()
    #: A class that marks the elements of a page that the board lives in.
    name = traitlets.Unicode().tag(sync=True)
    columns: Any = traitlets.List().tag(sync=True)
    #: Whether there is a button Diagnose.
    diagnoses = traitlets.Bool().tag(sync=True)
    #: Everything, for a page that opens; what changes travels in messages.
    snapshot = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        cluster: Cluster,
        shell: InteractiveShell,
        diagnose: Callable[[], Sequence[Verdict]] | None = None,
    ) -> None:
        self._shell = shell
        self._kernel = shell.kernel  # type: ignore[attr-defined]
        self._outputs: list[tuple[DisplayPublisher, str]] = []
        self._closing = threading.Lock()
        # A board is made by a cell: until it ends, messages may not get through.
        self._cell_runs = True
        self._feed = BoardFeed(cluster, self._tell, self._keep, self._is_occupied)
        self._actions = BoardActions(
            cluster,
            diagnose,
            self._tell,
            lambda: self._feed.model,
            self._feed.judge,
            self._feed.nudge,
            self._line,
        )
        super().__init__(
            name=f"rankscope-board-{uuid.uuid4().hex}",
            columns=[column.as_dict() for column in COLUMNS],
            diagnoses=diagnose is not None,
        )
        self.on_msg(self._heard)
        events: Any = shell.events
        events.register("pre_run_cell", self._cell_began)
        events.register("post_run_cell", self._cell_ended)

    # -- what others do with it -----------------------------------------------

    def judge(self, verdicts: Iterable[Verdict]) -> None:
        """Show what the diagnosis says; ``[]``: that nothing is wrong."""
        self._feed.judge(verdicts)

    def show(self) -> None:
        """Show the board below the cell that runs, there too if elsewhere already."""
        publisher = self._shell.display_pub
        display_id = f"{self.name}-{len(self._outputs)}"
        publisher.publish(self._bundle(), transient={"display_id": display_id})
        if not isinstance(publisher, CapturingDisplayPublisher):
            self._outputs.append((publisher, display_id))

    def close(self) -> None:
        """End the board; its outputs keep the state that was last."""
        with self._closing:
            if self.comm is None:
                return
            self._feed.close()
            events: Any = self._shell.events
            events.unregister("pre_run_cell", self._cell_began)
            events.unregister("post_run_cell", self._cell_ended)
            self._keep()
            super().close()

    def serve_messages(self) -> None:
        """Handle clicks that wait for the main thread, which calls this."""
        if self.comm is not None:
            serve_messages(self._kernel, {self.model_id})

    @property
    def running(self) -> bool:
        """Whether it costs anything: some page shows it."""
        return self._feed.running

    # -- the page ---------------------------------------------------------------

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """The traits, as ipywidgets sends them, with the state as it is now."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if "snapshot" in state:
            state["snapshot"] = self._feed.full()
        return state

    def _tell(self, message: Message) -> None:
        if self.comm is not None:
            self.send(message)

    def _heard(self, widget: Any, message: Any, buffers: Any) -> None:
        """Take in what a page says, on whatever thread serves its messages."""
        if not isinstance(message, dict):
            return
        if "watch" in message:
            self._feed.watch(str(message["watch"]))
        elif "unwatch" in message:
            self._feed.unwatch(str(message["unwatch"]))
        elif "sync" in message:
            self._feed.sync()
        elif "do" in message:
            self._actions.start(message)

    # -- the cells of the notebook --------------------------------------------------

    def _cell_began(self, info: Any) -> None:
        self._cell_runs = True

    def _cell_ended(self, result: Any) -> None:
        self._cell_runs = False

    def _is_occupied(self) -> bool:
        return self._cell_runs

    def _line(self, cell: int, line: int) -> str:
        """Line `line` of the notebook's cell number `cell`, if it is known."""
        history = self._shell.history_manager
        cells = history.input_hist_raw if history is not None else []
        lines = cells[cell].splitlines() if 0 < cell < len(cells) else []
        return lines[line - 1] if 0 < line <= len(lines) else ""

    # -- outputs ------------------------------------------------------------------

    def _bundle(self) -> dict[str, Any]:
        """The state as text and as HTML, which is where a page puts the board."""
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

    def _needs_view(self) -> bool:
        """Whether the front end can show the board only as a widget's view."""
        return (
            "__vsc_ipynb_file__" in self._shell.user_ns or "google.colab" in sys.modules
        )

    def _keep(self) -> None:
        """Put the present state into the outputs, for when they are saved."""
        if not self._outputs or self._needs_view():
            return
        bundle = self._bundle()
        for publisher, display_id in self._outputs:
            publisher.publish(bundle, transient={"display_id": display_id}, update=True)

    def _ipython_display_(self) -> None:
        self.show()

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict, dict]:
        return self._bundle(), {}
