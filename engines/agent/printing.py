"""What a cell prints on a rank, made fit to be shown beside that of other ranks."""

from __future__ import annotations

import linecache
import sys
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ipykernel.iostream import OutStream

from rankscope.backends.torch_watch.patching import when_imported

from ..wire.print_marks import mark
from .cell_source import CellSource

__all__ = ["PrintMarks", "name_cells_in_warnings", "print_progress_as_text"]


class PrintMarks:
    """Marks the lines that one call writes, while a cell of the notebook runs."""

    def __init__(self) -> None:
        self._marked: list[OutStream] = []

    def begin(self) -> None:
        """Mark what the main thread writes from now on to stdout and stderr."""
        self.end()
        for stream in (sys.stdout, sys.stderr):
            # A stream of the user's own is left alone.
            if isinstance(stream, OutStream):
                vars(stream)["write"] = _marking(stream)
                self._marked.append(stream)

    def end(self) -> None:
        """Write without marks again: other front ends show what they get."""
        for stream in self._marked:
            vars(stream).pop("write", None)
        self._marked.clear()


def _marking(stream: Any) -> Callable[[str], int | None]:
    write = stream.write

    def write_marked(text: str) -> int | None:
        # Another thread passes on what C code wrote, in pieces that mean nothing.
        is_call = threading.current_thread() is threading.main_thread()
        return write(mark(text) if is_call and isinstance(text, str) else text)

    return write_marked


def name_cells_in_warnings(source: CellSource) -> None:
    """Have warnings say ``cell 7 line 3``, not the file that IPython gave the cell.

    Its name differs from rank to rank, so that a warning would be shown for each.
    """
    plain = warnings.formatwarning

    def formatted(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if not source.is_cell(filename):
            return plain(message, category, filename, lineno, line)
        text = (line or linecache.getline(filename, lineno)).strip()
        place = source.describe(filename, lineno)
        shown = f"  {text}\n" if text else ""
        return f"{place}: {category.__name__}: {message}\n{shown}"

    warnings.formatwarning = formatted


def print_progress_as_text() -> None:
    """Have ``tqdm.auto`` and ``tqdm.notebook`` print text bars, once imported.

    Their bars are widgets, whose model stays on the rank: in the notebook they would
    stand at 0 %. A text bar is drawn there for each rank.
    """
    when_imported("tqdm.notebook", _use_text_bars)


def _use_text_bars(module: ModuleType) -> None:
    from tqdm import std

    names: dict[str, Any] = {"tqdm": std.tqdm, "trange": std.trange}
    vars(module).update(names, tqdm_notebook=std.tqdm, tnrange=std.trange)
