"""Refuse processes: ``make check`` runs the tests without the marker ``processes``.

A test that starts one, or a fixture of it, carries ``@pytest.mark.processes``.
`Watch` finds a test that lacks the marker.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Watch"]

#: What Python announces before a process starts (`sys.addaudithook`).
EVENTS = frozenset(
    {
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "pty.spawn",
        "subprocess.Popen",
    }
)


class Watch:
    """Refuse processes in a block, and keep what was refused."""

    def __init__(self) -> None:
        self._on = False
        self._seen: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._on and event in EVENTS:
            what = f"{event}: {arguments[0]!r}" if arguments else event
            self._seen.append(what)
            raise PermissionError(f"no process may start here ({what})")

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False

    def refused(self) -> list[str]:
        """Return what was refused since the last call."""
        refused, self._seen = self._seen, []
        return refused
