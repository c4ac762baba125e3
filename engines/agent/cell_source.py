"""The lines of cells: of errors, of stacks, and of the ops in the flight recorder."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType
from typing import Any

__all__ = ["CellSource"]


class CellSource:
    """Finds cells and their lines by the names of files that IPython gives them."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def name_of(self, filename: str) -> str | None:
        """Return ``Cell In[7]`` for the file of cell 7, ``None`` for other files."""
        named = self._shell.compile.format_code_name(filename)
        return None if named is None else " ".join(named)

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
        named = self._shell.compile.format_code_name(filename)
        if named is None:
            return None
        return f"cell {named[1].removeprefix('In[').removesuffix(']')}"

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

    def innermost(self, thread: int) -> str:
        """Return the innermost line of a cell in the stack of a thread, or ``""``."""
        frame = sys._current_frames().get(thread)
        for one, line in traceback.walk_stack(frame) if frame is not None else ():
            if self.is_cell(one.f_code.co_filename):
                return self.describe(one.f_code.co_filename, line)
        return ""
