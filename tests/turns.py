"""Locks by which a test with the marker ``alone`` runs while no other test does.

``pytest -n`` runs tests on several workers at once. A test with the marker ``alone``
measures time, or has a limit of time that a busy machine exceeds. It starts when the
running tests of the other workers have ended; their next tests start after its end.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["Turns"]


class Turns:
    """A lock of all workers that tests share and an ``alone`` test has for itself.

    `folder` is the same for all workers of a run.
    """

    def __init__(self, folder: Path) -> None:
        self._machine = (folder / "machine.lock").open("ab")
        # A worker that waits for the machine holds the entrance: flock is not fair,
        # and another worker that asks again at once would always be first.
        self._entrance = (folder / "entrance.lock").open("ab")

    def close(self) -> None:
        """Close the files; nothing may be held."""
        self._machine.close()
        self._entrance.close()

    @contextlib.contextmanager
    def take(self, alone: bool) -> Iterator[None]:
        """Run a test in the block, `alone` or beside others."""
        with _locked(self._entrance, fcntl.LOCK_EX):
            fcntl.flock(self._machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(self._machine, fcntl.LOCK_UN)


@contextlib.contextmanager
def _locked(file: BinaryIO, how: int) -> Iterator[None]:
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
