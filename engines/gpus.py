"""GPUs: which one each rank uses, and what is known of it.

A rank's GPU is its engine's current CUDA device. Ranks of one host take the
devices in turn, by their local rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

__all__ = ["Gpu", "Gpus", "choose_device", "load_cupy"]

#: One of these is there where a GPU's driver is: NVIDIA, WSL, AMD.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
#: Seconds between two looks at a GPU's memory.
LOOK = 1.0

_DEVICES, _SHARE = "RANKSCOPE_DEVICES", "RANKSCOPE_SHARE_GPU"


@dataclass(frozen=True)
class Gpus:
    """What was asked for: `devices` of each host (none: all), shared or not.

    Sharing puts several ranks on one GPU, which NCCL refuses for good reasons:
    their kernels wait for each other, and what they send takes the detour over
    loopback sockets. It is for learning on a machine with one GPU; nothing
    measured there says anything of NCCL.
    """

    devices: tuple[int, ...] = ()
    share: bool = False

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that tell the engine of `rank`."""
        env = {}
        if self.devices:
            env[_DEVICES] = ",".join(map(str, self.devices))
        if self.share:
            env[_SHARE] = "1"
            # NCCL takes two ranks with one GPU for a mistake if they are of one
            # host, which it knows by this.
            env["NCCL_HOSTID"] = f"rankscope-rank-{rank}"
            env["NCCL_SOCKET_IFNAME"] = "lo"
            env["NCCL_IB_DISABLE"] = "1"
        return env


def choose_device(env: Mapping[str, str], count: int) -> int | None:
    """The device of the rank that `env` describes, of `count` there are.

    ``None`` where there is none. Raises `ValueError` for a device that is not
    there.
    """
    wanted = [int(number) for number in env.get(_DEVICES, "").split(",") if number]
    missing = [number for number in wanted if number >= count]
    if missing:
        there = f"devices 0 to {count - 1}" if count else "no GPU that can be used"
        raise ValueError(
            f"rank {env['RANK']}: --devices {','.join(map(str, wanted))}: device "
            f"{missing[0]} is not there, its host has {there}"
        )
    if not count:
        return None
    devices = wanted or list(range(count))
    return devices[int(env["LOCAL_RANK"]) % len(devices)]


def must_share(env: Mapping[str, str], count: int) -> bool:
    """Whether ranks of this host have to share a GPU, and were not told to."""
    devices = len([n for n in env.get(_DEVICES, "").split(",") if n]) or count
    return 0 < devices < int(env["LOCAL_WORLD_SIZE"]) and _SHARE not in env


def load_cupy() -> Any | None:
    """cupy, if it is installed and there is a GPU to use it with."""
    # Importing it takes a second, in each engine: not for nothing.
    if not any(map(os.path.exists, GPU_DEVICES)) or find_spec("cupy") is None:
        return None
    import cupy

    try:
        return cupy if cupy.cuda.runtime.getDeviceCount() > 0 else None
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


class Gpu:
    """The GPU of this rank."""

    def __init__(self, cupy: Any, index: int) -> None:
        self._cupy, self.index = cupy, index
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        self.name = properties["name"].decode()
        self._said, self._looked = "", 0.0

    def use(self) -> None:
        """Make it the calling thread's current device."""
        self._cupy.cuda.Device(self.index).use()

    def describe(self) -> str:
        """``GPU 0 · NVIDIA H200 · 1.2 of 139.8 GiB``, for the board."""
        now = time.monotonic()
        if now - self._looked > LOOK:
            self._looked = now
            with self._cupy.cuda.Device(self.index):
                free, total = self._cupy.cuda.runtime.memGetInfo()
            gib = f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB"
            self._said = f"GPU {self.index} · {self.name} · {gib}"
        return self._said
