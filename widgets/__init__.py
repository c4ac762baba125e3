"""What a person sees: the status table, a line of progress."""

from __future__ import annotations

from .progress import ProgressLine
from .ranks import format_ranks, name_ranks
from .status_table import StatusTable

__all__ = ["ProgressLine", "StatusTable", "format_ranks", "name_ranks"]
