"""How many ranks this machine can hold: a start that would choke it is refused."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from ..errors import ClusterStartError

__all__ = ["MEMORY_PER_RANK", "RANKS_PER_CORE", "check"]

#: Ranks that share one core at most. Each polls, and answers the board.
RANKS_PER_CORE = 32
#: Bytes that a rank takes with its interpreter, numpy and a group, rounded up.
MEMORY_PER_RANK = 60 * 10**6

_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def check(n: int) -> None:
    """Raise `ClusterStartError` if `n` more ranks are too many for this machine."""
    cores, free = len(os.sched_getaffinity(0)), free_memory()
    per_core, memory = n / cores, n * MEMORY_PER_RANK
    reasons = []
    if per_core > RANKS_PER_CORE:
        reasons.append(
            f"{per_core:.0f} would share each of the {cores} cores, and more than "
            f"{RANKS_PER_CORE} leave no time for the notebook"
        )
    if memory > free:
        reasons.append(
            f"they need {_gigabytes(memory)} of memory (60 MB each), and "
            f"{_gigabytes(free)} are free"
        )
    if reasons:
        most = max(1, min(cores * RANKS_PER_CORE, free // MEMORY_PER_RANK))
        raise ClusterStartError(
            f"{n} ranks are too many for this machine: {'; '.join(reasons)}. Start at "
            f"most {most}, or all of them with --force (in Python: force=True)"
        )


def free_memory() -> int:
    """Return the bytes that new processes can take, also within a container's limit."""
    free = psutil.virtual_memory().available
    try:
        # Version 2 has one line, 0::/PATH.
        path = _CGROUP.read_text().rpartition("::")[2].strip().lstrip("/")
        folder = _CGROUPS / path
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        statistics = (folder / "memory.stat").read_text().split()
    except OSError:
        # No cgroups of version 2, or the root of them, which has no limit.
        return free
    if limit == "max":
        return free
    # Files in the page cache count as used, and give way.
    cached = int(statistics[statistics.index("inactive_file") + 1])
    return max(0, min(free, int(limit) - used + cached))


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
