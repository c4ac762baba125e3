"""What the commands of a terminal have in common: how they print, and how they end."""

from __future__ import annotations

import select
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
    """Say why ``rankscope COMMAND`` is not done; return `FAILED`.

    That the reader of its output has ended, as ``head`` does, is raised for `__main__`.
    """
    if isinstance(why, BrokenPipeError) and _reader_has_ended():
        raise why
    say(f"rankscope {command}: {why}", file=sys.stderr)
    return FAILED


def _reader_has_ended() -> bool:
    """Return whether stdout is broken; a connection to a rank may be, too."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))
