"""Renderer: shows merged items, in a notebook or a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from rankscope.backends.rank_sets import format_ranks, group_by, name_ranks
from rankscope.engines.errors import plain
from rankscope.engines.wire import ipyparallel_private as private
from rankscope.widgets.display_id import new_display_id

from .bars import bar_table
from .deduplicate import Entry, Item
from .failures import brief_lines, report
from .parse import Bundle
from .tabs import can_be_in_tab, tabs

__all__ = ["Renderer", "label_lines", "label_width"]

#: Distinct unfinished lines that are shown while a cell runs.
PARTIALS = 16

HEADER = (
    '<div style="color: var(--jp-ui-font-color2, inherit); '
    "font-family: var(--jp-ui-font-family, system-ui, sans-serif); "
    'font-size: 0.85em; margin-top: 0.4em; opacity: 0.85">{}</div>'
)

DETAILS = (
    '<details style="color: var(--jp-ui-font-color1, inherit)">'
    '<summary style="cursor: pointer">{}</summary><pre>{}</pre></details>'
)


class Renderer:
    """Shows the items of one cell below a `heading`; `ranks` are the cluster's."""

    def __init__(
        self, shell: InteractiveShell, ranks: Sequence[int], heading: str = ""
    ) -> None:
        self._shell = shell
        self._heading = heading
        self._width = label_width(ranks)
        self._partials: str | None = None
        # Whether the last output can be in a tab, and whether another came after it.
        self._ends_with_panel = self._is_split = self._has_folded = False
        self._overwrites = not self.is_rich and sys.stdout.isatty()
        self._line_written = False
        # By identity: two bundles may be equal, and are kept by the parser.
        self._handles: dict[int, str] = {}
        self._notices: list[str] = []
        self._hang: Mapping[str, str] | None = None
        self._hang_id: str | None = None
        # That of the notebook's cell: front ends show below it what names it.
        self._parent = (
            self._kernel.get_parent("shell")["header"] if self.is_rich else {}
        )
        self._show_heading()

    @property
    def _kernel(self) -> Any:
        return getattr(self._shell, "kernel", None)

    @property
    def is_rich(self) -> bool:
        """Whether a front end shows more than text."""
        return self._kernel is not None

    def _publish(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Show a display, below all that was printed, or update the one with the id."""
        if not update:
            sys.stdout.flush()
            sys.stderr.flush()
        transient = None if display_id is None else {"display_id": display_id}
        self._shell.display_pub.publish(
            data, metadata, transient=transient, update=update
        )

    @property
    def can_redraw(self) -> bool:
        """Whether shown items can be removed (not under ``%%capture``)."""
        return self.is_rich and not isinstance(
            self._shell.display_pub, CapturingDisplayPublisher
        )

    def show(self, items: Iterable[Item]) -> None:
        self._erase_line()
        for kind, group in groupby(items, key=self._kind):
            if kind == "error" and self.is_rich:
                self._fold(list(group))
            elif kind == "display":
                self._displays(list(group))
            else:
                self._ends_with_panel = False
                self._write(kind, group)

    def _kind(self, item: Item) -> str:
        # A result that is text may belong in a tab, beside what its rank displayed.
        return "display" if item.kind == "text" and self.is_rich else item.kind

    def _write(self, kind: str, items: Iterable[Item]) -> None:
        text = "".join(map(self._text, items))
        # Flush the other stream first, or a front end may change the order.
        other, stream = sys.stderr, sys.stdout
        if kind in ("stderr", "error"):
            other, stream = stream, other
        other.flush()
        stream.write(text)
        stream.flush()

    def _fold(self, items: Sequence[Item]) -> None:
        """Show errors as a line each, which opens to their tracebacks."""
        lines = brief_lines(item.contents for item in items)
        traces = (plain(report(item.contents, self._width > 0)) for item in items)
        html = DETAILS.format(escape("; ".join(lines)), escape("\n\n".join(traces)))
        self._publish({"text/plain": "\n".join(lines), "text/html": html})
        # Several are one at the end.
        self._is_split |= self._has_folded
        self._has_folded = True

    def redraw(self, items: Iterable[Item]) -> None:
        shown, notices = list(items), self._notices
        # `wait` avoids flicker, but needs output that follows.
        wait = bool(shown or notices or self._heading)
        self._shell.display_pub.clear_output(wait)  # type: ignore[no-untyped-call]
        self._partials, self._notices = None, []
        self._hang = self._hang_id = None
        self._ends_with_panel = self._is_split = self._has_folded = False
        self._show_heading()
        self.show(shown)
        for text in notices:
            self.notify(text)

    def _show_heading(self) -> None:
        if not self._heading:
            return
        if self.is_rich:
            self._publish(_header(self._heading))
        else:
            print(self._heading, flush=True)

    def notify(self, text: str) -> None:
        """Show a line about the cell, below its output."""
        self._notices.append(text)
        self._erase_line()
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)

    def hang(self, bundle: Mapping[str, str] | None) -> None:
        """Show why the cell hangs, below its output; ``None``: it goes on."""
        if bundle == self._hang:
            return
        self._hang = bundle
        if self.can_redraw:
            known = self._hang_id
            self._hang_id = known or new_display_id()
            shown = bundle or {"text/plain": "", "text/html": ""}
            self._publish(shown, None, self._hang_id, known is not None)
        elif bundle is not None:
            self._erase_line()
            sys.stdout.flush()
            print(bundle["text/plain"], file=sys.stderr, flush=True)

    # -- unfinished lines ---------------------------------------------------

    @property
    def is_provisional(self) -> bool:
        """Whether a redraw changes what is shown."""
        return bool(self._partials or self._hang_id or self._is_split)

    def partials(self, lines: dict[int, str]) -> None:
        """Show the unfinished line of each rank, in place of those shown before."""
        groups = group_by(lines, lines.__getitem__)
        shown = list(groups.items())[:PARTIALS]
        rows = [
            label_lines(line, ranks, self._width).rstrip("\n") for line, ranks in shown
        ]
        if len(groups) > PARTIALS:
            rows.append(f"… and {len(groups) - PARTIALS} more")
        if self.can_redraw:
            known = self._partials
            self._partials = known or new_display_id()
            bundle = {"text/plain": "\n".join(rows)}
            bars = bar_table(shown)
            if bars is not None:
                bundle["text/html"] = bars
            self._publish(bundle, None, self._partials, known is not None)
        elif self._overwrites and rows:
            # A terminal can erase one line only.
            more = f" … ({len(rows)} lines)" if len(rows) > 1 else ""
            room = shutil.get_terminal_size().columns - len(more) - 1
            print(f"\r\x1b[2K{plain(rows[0])[:room]}{more}", end="", flush=True)
            self._line_written = True

    def _erase_line(self) -> None:
        if self._line_written:
            self._line_written = False
            print("\r\x1b[2K", end="", flush=True)

    # -- items --------------------------------------------------------------

    def _text(self, item: Item) -> str:
        if item.kind == "error":
            return brief_lines([item.contents])[0] + "\n"
        content = item.content
        text = content.text if isinstance(content, Bundle) else content
        return label_lines(text, item.ranks, self._width)

    def _displays(self, items: Sequence[Item]) -> None:
        """Show displays and results, those of several ranks that differ in tabs."""
        self._is_split |= self._ends_with_panel and self._is_panel(items[0])
        # Text alone stays text.
        only_text = all(item.kind == "text" for item in items)
        self._ends_with_panel &= only_text
        self._ends_with_panel |= not only_text and self._is_panel(items[-1])
        alone: list[Item] = []
        panels: dict[tuple[int, ...], list[Bundle]] = {}
        for item in items:
            held = self._is_panel(item)
            others = {rank for ranks in panels if ranks != item.ranks for rank in ranks}
            if not held or not others.isdisjoint(item.ranks):
                # A rank's outputs stay in their order.
                self._show_panels(panels, alone)
                panels, alone = {}, []
            if not held:
                self._display(item)
                continue
            alone.append(item)
            panels.setdefault(item.ranks, []).append(item.content)
        self._show_panels(panels, alone)

    def _is_panel(self, item: Item) -> bool:
        return (
            self.is_rich
            and self._width > 0
            and (item.kind == "text" or can_be_in_tab(item.content))
        )

    def _show_panels(
        self, panels: Mapping[tuple[int, ...], Sequence[Bundle]], items: Sequence[Item]
    ) -> None:
        """Show `items` as they are, or the tabs `panels` where those are several."""
        if sum(not all(one.is_text for one in held) for held in panels.values()) > 1:
            self._publish(tabs(sorted(panels.items())))
            return
        for is_text, found in groupby(items, key=lambda item: item.kind == "text"):
            if is_text:
                self._write("stdout", found)
                continue
            for item in found:
                self._display(item)

    def _display(self, item: Item) -> None:
        bundle: Bundle = item.content
        if not self.is_rich:
            print(label_lines(bundle.text, item.ranks, self._width), end="", flush=True)
            return
        if self._width:
            self._publish(_header(name_ranks(item.ranks)))
        handle = None
        if bundle.display_id is not None:
            handle = self._handles[id(bundle)] = new_display_id()
        self._publish(bundle.data, bundle.metadata, handle)

    def update(self, bundle: Bundle) -> None:
        handle = self._handles.get(id(bundle))
        if handle is not None:
            self._publish(bundle.data, bundle.metadata, handle, update=True)

    # -- after the end -----------------------------------------------------------

    def late(self, rank: int, cell: int | None, entries: Sequence[Entry]) -> None:
        """Show what outlives its `cell` on a rank, below it; on any thread."""
        for entry in entries:
            content = entry.content
            if entry.kind == "display" and self.is_rich:
                own = content.data, content.metadata
                for data, metadata in ((_header(name_ranks([rank])), {}), own):
                    shown = {"data": data, "metadata": metadata, "transient": {}}
                    private.publish(self._kernel, "display_data", shown, self._parent)
                continue
            text = content.text if isinstance(content, Bundle) else content
            text = label_lines(text, [rank], self._width)
            name = "stderr" if entry.kind == "stderr" else "stdout"
            if self.is_rich:
                printed = {"name": name, "text": text}
                private.publish(self._kernel, "stream", printed, self._parent)
                continue
            if cell is not None:
                text = "".join(f"cell {cell} {line}\n" for line in text.splitlines())
            stream = getattr(sys, name)
            stream.write(text)
            stream.flush()


def _header(text: str) -> dict[str, str]:
    return {"text/html": HEADER.format(escape(text)), "text/plain": text}


def label_width(ranks: Sequence[int]) -> int:
    """Return the width of labels in a cluster of `ranks`: 0 for a single rank."""
    return 0 if len(ranks) < 2 else len(f"[{format_ranks(ranks)}] ")


def label_lines(text: str, ranks: Iterable[int], width: int) -> str:
    """Return `text` with the label of `ranks` before each line."""
    if not width:
        return f"{text}\n"
    label = f"[{format_ranks(ranks)}] ".ljust(width)
    return "".join(f"{(label + line).rstrip()}\n" for line in text.split("\n"))
