"""OutputParser: Jupyter outputs of ranks into entries for the deduplicator."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rankscope.engines import Output, RankError
from rankscope.engines.wire.print_marks import MARKED, without_mark

from .bars import is_progress
from .deduplicate import Entry
from .failures import failure_key, failure_of
from .lines import Line, LineBuffer

__all__ = ["Bundle", "OutputParser", "failure"]

_WIDGET = "application/vnd.jupyter.widget-view+json"
#: Follows the text of a widget: the notebook has no model of it.
_NO_WIDGET = (
    "a widget lives on its rank, where no click reaches it: show what it shows, or "
    "%dist_pull its values and make the widget in the notebook"
)

#: What differs in the same display of two ranks: addresses in reprs, and the random
#: ids of a styled table of pandas.
_IDENTITY = re.compile(r"\b0x[0-9a-f]{6,16}\b|\bT_[0-9a-f]{5}(?=_|\b)")
#: What differs in the same warning of two ranks: the process in the file of a cell.
_PROCESS = re.compile(r"ipykernel_\d+")

#: A frame of a C++ stack, which torch adds to what its C++ code writes.
_CPP_FRAME = re.compile(r"frame #\d+: .*(\(0x[0-9a-f]+ in .*\)|\[0x[0-9a-f]+\])")
_CPP_STACK = re.compile(r"(Exception raised from .*) \(most recent call first\):")


@dataclass
class Bundle:
    """A mime bundle of a rank; `data` changes when the rank updates its display."""

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    #: The rank's own display id, by which it updates the display.
    display_id: str | None = None

    @property
    def text(self) -> str:
        fallback = f"<{', '.join(self.data)}>" if self.data else ""
        return str(self.data.get("text/plain", fallback))

    @property
    def is_text(self) -> bool:
        return set(self.data) <= {"text/plain"}


class OutputParser:
    """Parses outputs of `ranks`; keeps unfinished lines until they are complete."""

    def __init__(self, ranks: Iterable[int], cell: int | None) -> None:
        self._cell = cell
        self._buffers: dict[int, dict[str, LineBuffer]] = {
            rank: {"stdout": LineBuffer(), "stderr": LineBuffer()} for rank in ranks
        }
        self._updatable: dict[tuple[int, str], Bundle] = {}
        #: Rank and stream → the lines of a call that has written more.
        self._calls: dict[tuple[int, str], list[str]] = {}

    def feed(self, rank: int, output: Output) -> list[Entry]:
        """Return the entries that `output` of `rank` completes."""
        kind = output["output_type"]
        if kind == "stream":
            name = output["name"]
            text = output[MARKED] if MARKED in output else output["text"]
            return self._lines(rank, name, self._buffers[rank][name].feed(text))
        if kind in ("display_data", "execute_result"):
            return [*self.flush(rank), self._display(rank, output)]
        if kind == "error":
            error = failure_of(rank, output, self._cell)
            return [*self.flush(rank), failure(error)]
        return []

    def update(self, rank: int, output: Output) -> Bundle | None:
        """Apply an ``update_display_data`` of `rank`; return the changed bundle."""
        display_id = (output.get("transient") or {}).get("display_id", "")
        bundle = self._updatable.get((rank, display_id))
        if bundle is not None:
            bundle.data = _showable(output["data"])
            bundle.metadata = dict(output.get("metadata") or {})
        return bundle

    def _display(self, rank: int, output: Output) -> Entry:
        bundle = Bundle(
            _showable(output["data"]),
            dict(output.get("metadata") or {}),
            (output.get("transient") or {}).get("display_id"),
        )
        content = json.dumps(
            [bundle.data, bundle.metadata], sort_keys=True, default=repr
        )
        if not bundle.is_text:
            content = _IDENTITY.sub("", content)
        key: tuple[Any, ...] = ("display", content)
        if bundle.display_id is None:
            return Entry("text" if bundle.is_text else "display", key, bundle)
        # A display that a rank may change is never shared with other ranks.
        self._updatable[rank, bundle.display_id] = bundle
        return Entry("display", (*key, rank), bundle)

    def flush(self, rank: int) -> list[Entry]:
        """Return the unfinished lines of `rank` as entries: its cell has ended."""
        return [
            entry
            for name, buffer in self._buffers[rank].items()
            for entry in self._lines(rank, name, buffer.flush(), last=True)
        ]

    def _lines(
        self, rank: int, name: str, lines: list[Line], last: bool = False
    ) -> list[Entry]:
        """Return an entry for each call that wrote `lines`, or a part of them."""
        entries = []
        call = self._calls.pop((rank, name), [])
        for marked, rewritten in lines:
            line, goes_on = without_mark(marked)
            if rewritten and not call and not goes_on and is_progress(line):
                # Bars are written to stderr, and are no errors.
                entries.append(_printed("stdout", [line]))
                continue
            if name == "stderr":
                # Sixty lines of every rank, of which none is the user's.
                if _CPP_FRAME.fullmatch(line):
                    continue
                line = _CPP_STACK.sub(r"\1 (its C++ stack is left out)", line)
            call.append(line)
            if not goes_on:
                entries.append(_printed(name, call))
                call = []
        if call and last:
            entries.append(_printed(name, call))
        elif call:
            self._calls[rank, name] = call
        return entries

    def partials(self) -> dict[int, str]:
        """Return rank → its unfinished line, often a progress bar."""
        found = {}
        for rank, buffers in self._buffers.items():
            text = "  ".join(b.partial.strip() for b in buffers.values() if b.partial)
            if text:
                found[rank] = text
        return found


def failure(error: RankError) -> Entry:
    return Entry("error", ("error", failure_key(error)), error)


def _printed(name: str, lines: Iterable[str]) -> Entry:
    text = "\n".join(lines)
    return Entry(name, (name, _PROCESS.sub("ipykernel", text)), text)


def _showable(data: dict[str, Any]) -> dict[str, Any]:
    shown = {mime: value for mime, value in data.items() if mime != _WIDGET}
    if _WIDGET not in data or set(shown) > {"text/plain"}:
        return shown
    return {"text/plain": f"{data.get('text/plain', 'widget')}: {_NO_WIDGET}"}
