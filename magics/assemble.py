"""Assembler: Jupyter outputs of ranks, as they come, into entries for the merger."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rankscope.engines import Output, RankError

from .failures import failure_key, failure_of
from .lines import LineBuffer
from .merge import Entry

__all__ = ["Assembler", "Bundle", "failure"]

#: A widget of a rank has no model in the notebook: what shows is its text.
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
        """The bundle for where only text can be shown."""
        fallback = f"<{', '.join(self.data)}>" if self.data else ""
        return str(self.data.get("text/plain", fallback))

    @property
    def is_text(self) -> bool:
        """Whether there is nothing but text in it."""
        return set(self.data) <= {"text/plain"}


class Assembler:
    """Takes outputs of `ranks`; keeps what is unfinished until it is complete."""

    def __init__(self, ranks: Iterable[int], cell: int | None) -> None:
        self._cell = cell
        self._buffers: dict[int, dict[str, LineBuffer]] = {
            rank: {"stdout": LineBuffer(), "stderr": LineBuffer()} for rank in ranks
        }
        self._updatable: dict[tuple[int, str], Bundle] = {}

    def feed(self, rank: int, output: Output) -> list[Entry]:
        """Return the entries that `output` of `rank` completes.

        ``update_display_data`` and ``clear_output`` make no entry: they change
        what is there already.
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
        """Carry out an ``update_display_data`` of `rank`; return what it changed."""
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
        # What a rank will change is its own, however it begins.
        self._updatable[rank, bundle.display_id] = bundle
        return Entry("display", (*key, rank), bundle)

    def flush(self, rank: int) -> list[Entry]:
        """Return what `rank` left unfinished as entries: its cell is over."""
        return [
            entry
            for name, buffer in self._buffers[rank].items()
            for entry in _lines(name, buffer.flush())
        ]

    def partials(self) -> dict[int, str]:
        """Rank → the line it is at, where it is unfinished: a progress bar, mostly."""
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
