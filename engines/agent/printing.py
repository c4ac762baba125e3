"""What a cell prints on a rank, fit to be shown beside other ranks; lines of cells."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import linecache
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from types import FrameType, ModuleType
from typing import Any

from ipykernel.iostream import OutStream

from rankscope.backends.rank_sets import format_ranks, group_by
from rankscope.backends.torch_watch.patching import when_imported
from rankscope.backends.work.user_code import calls_of_task, frame_of_thread

from ..wire.print_marks import mark

__all__ = [
    "CellSource",
    "PrintMarks",
    "make_colours_once",
    "name_cells_in_warnings",
    "print_progress_as_text",
]


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
    """Have warnings name cells: the names of their files differ from rank to rank."""
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


def make_colours_once() -> None:
    """Make the colours of tracebacks once: they are four fifths of an error's cost."""
    stack_data: Any = importlib.import_module("stack_data")
    pygments: Any = importlib.import_module("pygments.formatters.terminal256")
    formatter = pygments.Terminal256Formatter
    plain_style = stack_data.style_with_executing_node
    set_up = getattr(formatter, "_setup_styles", None)
    if set_up is None or hasattr(plain_style, "cache_clear"):
        return
    made: dict[tuple[Any, ...], Any] = {}

    def set_up_once(self: Any) -> None:
        key = self.style, self.usebold, self.useunderline, self.useitalic
        if key not in made:
            set_up(self)
            made[key] = self.style_string
        self.style_string = made[key]

    stack_data.style_with_executing_node = functools.cache(plain_style)
    formatter._setup_styles = set_up_once


def print_progress_as_text() -> None:
    """Have tqdm print text bars, once imported: its widgets would stay on the rank."""
    when_imported("tqdm.notebook", _use_text_bars)


def _use_text_bars(module: ModuleType) -> None:
    from tqdm import std

    names: dict[str, Any] = {"tqdm": std.tqdm, "trange": std.trange}
    vars(module).update(names, tqdm_notebook=std.tqdm, tnrange=std.trange)


class CellSource:
    """Finds cells and their lines by the names of files that IPython gives them."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        # File → number and sender of its cell; number → the last one that sent a cell
        # with it: several notebooks may, and one whose kernel was restarted.
        self._sent: dict[str, tuple[int, str]] = {}
        self._senders: dict[int, str] = {}
        #: Client → the numbers of cells that no other one has sent since: ``3-5,7``.
        self.senders: dict[str, str] = {}

    def note(self, code: str, number: int, sender: str) -> None:
        """Note who has sent the cell that is about to run."""
        file = self._shell.compile.get_code_name(code, code, number)
        # A traceback looks every module up for each frame of a file that is none of
        # them: 2 ms.
        inspect.modulesbyfile[file] = "__main__"
        self._sent[file] = number, sender
        self._senders[number] = sender
        found = group_by(self._senders, self._senders.__getitem__)
        self.senders = {one: format_ranks(numbers) for one, numbers in found.items()}

    def name_of(self, filename: str) -> str | None:
        """Return ``Cell In[7]`` for the file of cell 7, ``None`` for other files.

        ``Cell In[7 (earlier)]`` where another client has sent a cell 7 since.
        """
        named = self._shell.compile.format_code_name(filename)
        if named is None:
            return None
        number, sender = self._sent.get(filename, (None, ""))
        if number is not None and self._senders[number] != sender:
            return f"Cell In[{number} (earlier)]"
        return " ".join(named)

    def is_cell(self, filename: str | None) -> bool:
        """Whether IPython compiled a cell as `filename`."""
        return filename is not None and self.name_of(filename) is not None

    def is_in_cell(self, frame: FrameType | None) -> bool:
        """Whether `frame`, or one that called it, is of a cell."""
        frames = (one for one, _ in traceback.walk_stack(frame))
        return frame is not None and any(
            self.is_cell(one.f_code.co_filename) for one in frames
        )

    def describe(self, filename: str, line: int) -> str:
        """Return ``cell 7 line 3``, or ``train.py line 3`` for a line of a file."""
        cell = self.cell_of(filename)
        return f"{cell or os.path.basename(filename)} line {line}"

    def cell_of(self, filename: str) -> str | None:
        """Return ``cell 7`` for the file of cell 7, ``None`` for other files."""
        name = self.name_of(filename)
        return name and f"cell {name.removeprefix('Cell In[').removesuffix(']')}"

    def line_of(self, error: BaseException) -> int | None:
        """Return the line of the running cell at which `error` was raised."""
        if isinstance(error, SyntaxError) and self.is_cell(error.filename):
            return error.lineno
        # Not a line of an earlier cell, whose function this cell called.
        this = f"Cell In[{self._shell.execution_count}]"
        lines = [
            number
            for frame, number in traceback.walk_tb(error.__traceback__)
            if self.name_of(frame.f_code.co_filename) == this
        ]
        return lines[-1] if lines else None

    def innermost(self, thread: int, suspended: Sequence[FrameType]) -> str:
        """Return the innermost line of a cell in a thread, or in `suspended` calls."""
        frame = frame_of_thread(thread)
        stack = [one for one, _ in traceback.walk_stack(frame)] if frame else []
        for one in chain(stack, reversed(suspended)):
            code = one.f_code
            if self.is_cell(code.co_filename):
                line = one.f_lineno or code.co_firstlineno
                return self.describe(code.co_filename, line)
        return ""

    def suspended(self, task: asyncio.Task[Any] | None) -> list[FrameType]:
        """Return the calls of a cell that awaits something, the innermost last."""
        calls = calls_of_task(task)
        # Below it are the calls of IPython.
        ours = (
            i for i, one in enumerate(calls) if self.is_cell(one.f_code.co_filename)
        )
        return calls[next(ours, len(calls)) :]
