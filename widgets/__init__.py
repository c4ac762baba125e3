"""Everything on the screen: the board, the tables, a line of progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bench_report import BenchReport
from .profile_report import ProfileReport
from .progress import ProgressLine
from .status_table import StatusTable

if TYPE_CHECKING:
    from .board.widget import Board

__all__ = [
    "BenchReport",
    "Board",
    "ProfileReport",
    "ProgressLine",
    "StatusTable",
]


def __getattr__(name: str) -> Any:
    # A terminal needs no widgets, and their import takes long.
    if name == "Board":
        from .board.widget import Board

        return Board
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
