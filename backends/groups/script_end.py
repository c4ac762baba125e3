"""The line at which a plain script has ended: Python keeps no `SystemExit` for it."""

from __future__ import annotations

import sys
from multiprocessing import parent_process
from opcode import opname
from types import FrameType

from ..work.flight_recorder import recorder
from ..work.user_code import is_installed

__all__ = ["line_that_ended", "script_frame"]


def script_frame() -> FrameType | None:
    """Return the frame of the script that runs; None where another process runs it."""
    frame: FrameType | None = sys._getframe()
    found = None
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            found = frame if frame.f_globals.get("__name__") == "__main__" else found
        frame = frame.f_back
    return found if parent_process() is None else None


def line_that_ended(script: FrameType | None) -> str:
    """Return the line of `script` at which a `SystemExit` has left it; empty: none.

    A frame keeps its last instruction: a return, where the script came to its end.
    """
    if script is None or is_installed(script.f_code.co_filename):
        return ""
    code, number = script.f_code, script.f_lineno
    if number is None or opname[code.co_code[script.f_lasti]].startswith("RETURN"):
        return ""
    return recorder.name_source((code.co_filename, number, code.co_name))
