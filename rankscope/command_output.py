"""What the commands of a terminal have in common: how they print, and how they end."""

from __future__ import annotations

import sys
from typing import TextIO

from rankscope.backends.printable import printable

__all__ = ["DONE", "FAILED", "HANGS", "fail", "say"]

#: Exit statuses; `__main__` describes them.
DONE, HANGS, FAILED = 0, 1, 2


def say(text: object, file: TextIO | None = None) -> None:
    """Print what ranks and jobs have named, too: see `printable`."""
    print(printable(str(text)), file=file)


def fail(command: str, why: object) -> int:
    """Say why ``rankscope COMMAND`` is not done; return `FAILED`."""
    say(f"rankscope {command}: {why}", file=sys.stderr)
    return FAILED
