"""What is refused before a rank starts: what ranks would lack, and too many of them."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil

from rankscope.backends import BackendConfig
from rankscope.backends.devices.cuda_install import has_driver
from rankscope.backends.groups.config import default_instead, why_unusable
from rankscope.backends.install import pip_install

from ..errors import ClusterError, ClusterStartError
from ..wire.torch_environment import TorchOptions

__all__ = [
    "INSTALL_TORCH",
    "check_backend",
    "check_capacity",
    "check_folder",
    "check_room",
    "check_torch",
    "number_of_ranks",
    "torch_options",
]

#: The remedy where torch is missing.
INSTALL_TORCH = pip_install("torch")


def check_backend(n: int, backend: str | None) -> None:
    """Raise `ClusterStartError` where the ranks would find no library of `backend`."""
    unusable = why_unusable(backend)
    if unusable is None:
        _check_gpu(backend)
        return
    how = f"%dist_init -n {n} (Cluster.start({n}))"
    raise ClusterStartError(
        f"--backend {backend}: {unusable}{default_instead(backend, how)}"
    )


def _check_gpu(backend: str | None) -> None:
    """Raise `ClusterStartError` for a config of GPUs alone where there is none."""
    if not backend or has_driver():
        return
    named = BackendConfig(backend).device_backend_map
    if set(named) == {"cuda"}:
        both = ",".join(f"{device}:{name}" for device, name in named.items())
        raise ClusterStartError(
            f"--backend {backend}: there is no GPU here, or no driver of it, and the "
            f"group would take no other arrays; --backend cpu:tcp,{both} takes those "
            "of the CPU, too"
        )


def number_of_ranks(n: object) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ClusterError(f"n={n!r}: the number of ranks, a whole number from 1")
    return n


def check_folder() -> None:
    """Raise `ClusterStartError` where the ranks would start in no folder."""
    try:
        os.getcwd()
    except OSError as error:
        raise ClusterStartError(
            f"the current folder, in which the ranks would start, is gone "
            f"({error.strerror}): %cd to another one (os.chdir) first"
        ) from None


def torch_options(torch: bool | str, backend: str | None) -> TorchOptions | None:
    options = TorchOptions.parse(torch)
    if options is not None and backend and not options.over_rankscope:
        raise ValueError(
            f"backend={backend!r} is for Rankscope's default group, which is not made "
            "on ranks of torch: name the backend of torch's group, as in "
            f"--torch {backend} (torch={backend!r}), or have Rankscope's group do "
            "torch's ops: --torch rankscope (torch='rankscope')"
        )
    return options


def check_torch() -> None:
    if find_spec("torch") is None:
        raise ClusterStartError(
            f"torch is not installed in {sys.executable}, which the ranks run on: "
            f"{INSTALL_TORCH}"
        )


#: Ranks that share one core at most. Each polls, and answers the board.
RANKS_PER_CORE = 32
#: Bytes that a rank takes with its interpreter, numpy and a group, rounded up.
MEMORY_PER_RANK = 60 * 10**6

_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def check_capacity(n: int) -> None:
    """Raise `ClusterStartError` if `n` more ranks are too many for this machine."""
    check_room(n, len(os.sched_getaffinity(0)), free_memory(), "this machine")


def check_room(n: int, cores: int, free: int, where: str) -> None:
    """Raise `ClusterStartError` if `n` more ranks are too many for a host."""
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
            f"{n} ranks are too many for {where}: {'; '.join(reasons)}. Start at "
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
