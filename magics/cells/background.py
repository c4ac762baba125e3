"""BackgroundCell: the handle of a ``%%distributed --async`` cell."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from rankscope.backends.rank_sets import name_ranks
from rankscope.backends.thread_start import start_thread
from rankscope.engines import Cluster, Execution, Output
from rankscope.engines.errors import plain
from rankscope.widgets.display_id import new_display_id

from ..output.deduplicate import Entry, Item
from ..output.failures import CellError, summary_of, tell
from ..output.parse import Bundle
from ..output.render import Renderer, label_lines, label_width
from ..output.stream import OutputStream, Shown
from ..output.wrapped import wrapped
from .cell import follow
from .monitor import CellMonitor, Hang

__all__ = ["BackgroundCell"]

#: Seconds between two updates of the displayed handle.
REFRESH = 0.25
#: Lines of output that the handle shows; `wait` shows all.
TAIL = 12

TEMPLATE = """\
<div style="font-family: var(--jp-ui-font-family, system-ui, sans-serif); \
font-size: var(--jp-ui-font-size1, 13px)"><b>{title}</b> · {state}</div>
<pre style="margin: 0.3em 0 0; line-height: var(--jp-code-line-height, 1.3); \
font-family: var(--jp-code-font-family, monospace); \
font-size: var(--jp-code-font-size, 13px)">{tail}</pre>"""


class BackgroundCell:
    """A cell that runs while the notebook continues.

    In a notebook the displayed handle is updated with its state and the last lines
    of its output, and while the cell hangs, with why: see `CellMonitor`. `wait`
    and `result` show the whole output.
    """

    def __init__(
        self,
        cluster: Cluster,
        execution: Execution,
        shell: InteractiveShell,
        *,
        hang: Hang = lambda ranks: None,
        collapse: bool = True,
        limit: float | None = None,
    ) -> None:
        self.execution = execution
        self._why: Mapping[str, str] = {}
        self._cluster = cluster
        self._shell = shell
        self._collapse = collapse
        self._limit = limit
        self._began = time.monotonic()
        self._took: float | None = None
        self._tail = _Tail(label_width(cluster.ranks), self._update)
        self._monitor = CellMonitor(cluster, execution, self._tail.notify, hang)
        self._display_id: str | None = None
        self._thread = start_thread(f"cell-{execution.cell}", self._watch)

    # -- calls of the user -------------------------------------------------

    @property
    def state(self) -> str:
        """``"running"``, ``"done"`` or ``"failed"``."""
        if not self.execution.done:
            return "running"
        return "failed" if self.execution.errors else "done"

    def wait(self, timeout: float | None = None) -> bool:
        """Show the output until the cell is done; return whether it is.

        Returns after `timeout` seconds at the latest. Ctrl-C ends the wait,
        not the cell.
        """
        renderer = Renderer(self._shell, self._cluster.ranks)
        stream = OutputStream(self.execution, renderer, collapse=self._collapse)
        follow(stream, timeout)
        return self.execution.done

    def result(self, timeout: float | None = None) -> dict[int, str | None]:
        """Wait, and return rank → text of the last expression (``None``: none).

        Raises `CellError` if the cell failed on a rank, `TimeoutError` if it
        still runs after `timeout` seconds; the cell is not ended then.
        """
        if not self.wait(timeout):
            raise TimeoutError(
                f"cell {self.execution.cell} still runs on "
                f"{name_ranks(self.execution.ranks_running)} after {timeout:g} s"
            )
        errors = self.execution.errors
        if errors:
            raise CellError(summary_of(errors.values()), errors)
        return {
            rank: _last_expression(self.execution.outputs(rank))
            for rank in self.execution.ranks
        }

    def interrupt(self) -> None:
        """Abort what is in flight and interrupt the ranks."""
        self._monitor.stop("interrupted from the notebook")

    # -- watching --------------------------------------------------------------

    def _watch(self) -> None:
        stream = OutputStream(self.execution, self._tail, collapse=self._collapse)
        stopped = False
        while not stream.done:
            stream.pump(REFRESH)
            self._monitor.tick(stream.failures)
            elapsed = time.monotonic() - self._began
            if self._limit is not None and elapsed > self._limit and not stopped:
                stopped = True
                reason = f"cell {self.execution.cell} passed its deadline"
                self._monitor.stop(f"{reason} of {self._limit:g} s")
                self._tail.notify(f"not done after {self._limit:g} s")
            self._why = self._monitor.why_it_hangs(stream.failures) or {}
            self._update()
        self._why = {}
        stream.close()
        self._took = time.monotonic() - self._began
        if self._monitor.groups:
            self._tail.notify(self._monitor.restore(True))
        self._update()
        stream.show_late()

    def _update(self) -> None:
        why = self._why.get("text/html", "")
        if self._display_id is None or not self._tail.changed(self._state() + why):
            return
        self._shell.display_pub.publish(
            self._repr_mimebundle_(),
            transient={"display_id": self._display_id},
            update=True,
        )

    # -- representation ---------------------------------------------------------

    def _title(self) -> str:
        number = self.execution.cell
        cell = "cell" if number is None else f"cell {number}"
        return f"{cell} on {name_ranks(self.execution.ranks)}"

    def _state(self) -> str:
        if self._took is not None:
            return f"{self.state} after {self._took:.1f} s"
        running = self.execution.ranks_running
        some = running and len(running) < len(self.execution.ranks)
        return f"{self.state} on {name_ranks(running)}" if some else self.state

    def __repr__(self) -> str:
        lines = [f"{self._title()}: {self._state()}", *self._tail.lines]
        return "\n".join([*lines, *filter(None, [self._why.get("text/plain")])])

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        html = TEMPLATE.format(
            title=escape(self._title()),
            state=escape(self._state()),
            tail=escape("\n".join(self._tail.lines)),
        )
        html += self._why.get("text/html", "")
        return {"text/plain": repr(self), "text/html": html}

    def _ipython_display_(self) -> None:
        if getattr(self._shell, "kernel", None) is None:
            print(repr(self))
            return
        display_id = new_display_id()
        self._shell.display_pub.publish(
            self._repr_mimebundle_(), transient={"display_id": display_id}
        )
        # Only a published display can be updated.
        self._display_id = display_id
        self._update()


class _Tail:
    """A surface that keeps the last lines as plain text."""

    is_provisional = False

    def __init__(self, width: int, on_late: Callable[[], None]) -> None:
        self._width = width
        self._on_late = on_late
        self._lines: list[str] = []
        self._partials: list[str] = []
        self._notices: list[str] = []
        self._known: tuple[object, ...] = ()

    #: The final form replaces the live one, as in a notebook.
    can_redraw = True

    @property
    def lines(self) -> list[str]:
        return [*(self._lines + self._partials)[-TAIL:], *self._notices]

    def changed(self, state: str) -> bool:
        """Return whether the text has changed since the last call."""
        before, self._known = self._known, (state, *self.lines)
        return self._known != before

    def notify(self, text: str) -> None:
        if text:
            self._notices.append(text)

    def show(self, items: Shown) -> None:
        for item in items:
            self._lines += self._render(item)
        del self._lines[:-TAIL]

    def redraw(self, items: Shown) -> None:
        self._lines, self._partials = [], []
        self.show(items)

    def update(self, bundle: Bundle) -> None:
        """Ignore it: `wait` shows displays."""

    def late(self, rank: int, cell: int | None, entries: Sequence[Entry]) -> None:
        items = [Item(one.kind, (rank,), (one.content,)) for one in entries]
        self.show(items)
        self._on_late()

    def partials(self, lines: dict[int, str]) -> None:
        self._partials = [
            row
            for rank, line in lines.items()
            for row in label_lines(plain(line), [rank], self._width).splitlines()
        ]

    def _render(self, item: Item) -> list[str]:
        content = item.content
        if item.kind == "error":
            return wrapped(tell(item.contents, "")).splitlines()
        text = content.text if isinstance(content, Bundle) else content
        return label_lines(plain(text), item.ranks, self._width).splitlines()


def _last_expression(outputs: list[Output]) -> str | None:
    for output in reversed(outputs):
        if output["output_type"] == "execute_result":
            return str(output["data"].get("text/plain", ""))
    return None
