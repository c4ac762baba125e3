"""The process's environment, which libraries of C read on threads of their own.

C's ``getenv`` may crash the process where another thread changes a variable meanwhile.
What Rankscope itself reads and changes on several threads does not meet here. Python's
own `os.environ` knows no such lock: what a user's thread changes is not held up.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["being_changed", "being_read"]

#: Seconds for which a change waits. MPI reads its variables in the first moments, and
#: may then wait for other processes.
PATIENCE = 2.0

_turn = threading.Condition()
_readers = 0


@contextlib.contextmanager
def being_read() -> Iterator[None]:
    """Have nobody change the environment in the block, up to `PATIENCE` seconds."""
    global _readers
    with _turn:
        _readers += 1
    try:
        yield
    finally:
        with _turn:
            _readers -= 1
            _turn.notify_all()


@contextlib.contextmanager
def being_changed() -> Iterator[None]:
    """Change the environment in the block, which has to be short."""
    with _turn:
        _turn.wait_for(lambda: not _readers, PATIENCE)
        yield


def _renew() -> None:
    """In a forked child: no other thread reads or changes anything there."""
    global _turn, _readers
    _turn, _readers = threading.Condition(), 0


os.register_at_fork(after_in_child=_renew)
