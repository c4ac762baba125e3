"""What a person sees: the board, the status table, a line of progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bench_report import BenchReport
from .progress import ProgressLine
from .ranks import format_ranks, name_ranks
from .status_table import StatusTable

if TYPE_CHECKING:
    from .board import Board

__all__ = [
    "BenchReport",
    "Board",
    "ProgressLine",
    "StatusTable",
    "format_ranks",
    "name_ranks",
]


def __getattr__(name: str) -> Any:
    # A terminal needs no widgets, and they take their time to import.
    if name == "Board":
        from .board import Board

        return Board
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
