"""OutputParser: Jupyter outputs of ranks into entries for the deduplicator."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rankscope.engines import Output, RankError

from .deduplicate import Entry
from .failures import failure_key, failure_of
from .lines import LineBuffer

__all__ = ["Bundle", "OutputParser", "failure"]

#: A widget of a rank has no model in the notebook: its text is shown.
_UNSHOWABLE = ("application/vnd.jupyter.widget-view+json",)


@dataclass
class Bundle:
    """A mime bundle of a rank; `data` changes when the rank updates its display."""

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    #: The rank's own display id, by which it updates the display.
    display_id: str | None = None

    @property
    def text(self) -> str:
        """The bundle as text."""
        fallback = f"<{', '.join(self.data)}>" if self.data else ""
        return str(self.data.get("text/plain", fallback))

    @property
    def is_text(self) -> bool:
        """Whether the bundle has nothing but text."""
        return set(self.data) <= {"text/plain"}


class OutputParser:
    """Parses outputs of `ranks`; keeps unfinished lines until they are complete."""

    def __init__(self, ranks: Iterable[int], cell: int | None) -> None:
        self._cell = cell
        self._buffers: dict[int, dict[str, LineBuffer]] = {
            rank: {"stdout": LineBuffer(), "stderr": LineBuffer()} for rank in ranks
        }
        self._updatable: dict[tuple[int, str], Bundle] = {}

    def feed(self, rank: int, output: Output) -> list[Entry]:
        """Return the entries that `output` of `rank` completes.

        ``update_display_data`` and ``clear_output`` make no entry: they change
        entries that exist.
        """
        kind = output["output_type"]
        if kind == "stream":
            name = output["name"]
            return _lines(name, self._buffers[rank][name].feed(output["text"]))
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
        key: tuple[Any, ...] = (
            "display",
            json.dumps([bundle.data, bundle.metadata], sort_keys=True, default=repr),
        )
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
            for entry in _lines(name, buffer.flush())
        ]

    def partials(self) -> dict[int, str]:
        """Return rank → its unfinished line, often a progress bar."""
        found = {}
        for rank, buffers in self._buffers.items():
            text = "  ".join(b.partial.strip() for b in buffers.values() if b.partial)
            if text:
                found[rank] = text
        return found


def failure(error: RankError) -> Entry:
    """Return the entry of an error."""
    return Entry("error", ("error", failure_key(error)), error)


def _lines(name: str, lines: list[str]) -> list[Entry]:
    return [Entry(name, (name, line), line) for line in lines]


def _showable(data: dict[str, Any]) -> dict[str, Any]:
    return {mime: value for mime, value in data.items() if mime not in _UNSHOWABLE}
