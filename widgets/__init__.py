"""Everything on the screen: the board, the tables, a line of progress."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bench_report import BenchReport
    from .board.widget import Board
    from .profile_report import ProfileReport
    from .progress import ProgressLine
    from .status_table import StatusTable

__all__ = [
    "BenchReport",
    "Board",
    "ProfileReport",
    "ProgressLine",
    "StatusTable",
]

_HOMES = {
    "BenchReport": "bench_report",
    "Board": "board.widget",
    "ProfileReport": "profile_report",
    "ProgressLine": "progress",
    "StatusTable": "status_table",
}


def __getattr__(name: str) -> Any:
    # At first use: a terminal needs no widgets, whose import takes long.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
