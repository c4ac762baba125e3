"""The memory of a process, for its status."""

from __future__ import annotations

import os

__all__ = ["resident_bytes"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes; ``None`` where unknown.

    That of its backends' side processes is not counted.
    """
    try:
        # psutil opens three files for the same, at every publication of a status.
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return None
