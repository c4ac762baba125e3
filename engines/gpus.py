"""GPUs: which one each rank uses, and what is known of it.

A rank's GPU is its engine's current CUDA device. Ranks of one host take the
devices in turn, by their local rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rankscope.backends import unavailable_reason
from rankscope.backends.nccl_library import DRIVER_FILES

from .errors import ClusterError
from .runs import parse_runs

__all__ = [
    "Gpu",
    "Gpus",
    "choose_device",
    "has_driver",
    "load_cupy",
    "must_share",
    "parse_devices",
]

#: One of these is there where a GPU's driver is: NVIDIA's or AMD's.
GPU_DEVICES = (*DRIVER_FILES, "/dev/kfd")
#: Seconds between two looks at a GPU's memory.
LOOK = 1.0

_DEVICES, _SHARE = "RANKSCOPE_DEVICES", "RANKSCOPE_SHARE_GPU"
#: What such a variable says where it says no.
_NO = ("", "0", "false", "no", "off")
#: GPUs of a host at most: a run of more is a slip of the finger.
_MOST = 1024


def parse_devices(devices: str | int | Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of GPUs that `devices` names, in its order.

    It is a text such as ``"0,2-3"``, or one or several numbers; none at all
    are all GPUs, ``()``. Raises `ValueError` for what is not the number of a
    GPU, and for one that is given twice.
    """
    if not isinstance(devices, str):
        numbers = devices if isinstance(devices, Iterable) else [devices]
        devices = ",".join(map(str, numbers))
        if not devices:
            return ()
    runs = parse_runs(devices, "GPU")
    last = max(run[-1] for run in runs)
    if last >= _MOST:
        raise ValueError(f"no host has a GPU {last}")
    found = [number for run in runs for number in run]
    for number in found:
        if found.count(number) > 1:
            raise ValueError(
                f"GPU {number} is given twice: name it once, and let ranks share it "
                "with --share-gpu (share_gpu=True)"
            )
    return tuple(found)


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
            # They are of one host all the same. Loopback always joins them, so
            # what the user's environment says of networks does not count here;
            # NVLink between hosts would take their one GPU for two.
            env["NCCL_SOCKET_IFNAME"] = "lo"
            env["NCCL_IB_DISABLE"] = "1"
            env["NCCL_MNNVL_ENABLE"] = "0"
        return env


def choose_device(env: Mapping[str, str], count: int) -> int | None:
    """The device of the rank that `env` describes, of `count` there are.

    ``None`` where there is none. Raises `ClusterError` for a device that is
    not there.
    """
    wanted = _wanted(env)
    missing = [number for number in wanted if number >= count]
    if missing:
        raise ClusterError(
            f"--devices {','.join(map(str, wanted))}: device {missing[0]} is not "
            f"there, its host has {_devices_there(count)}"
        )
    if not count:
        return None
    devices = wanted or range(count)
    return devices[int(env["LOCAL_RANK"]) % len(devices)]


def must_share(env: Mapping[str, str], count: int) -> bool:
    """Whether ranks of this host have to share a GPU, and were not told to."""
    devices = len(_wanted(env)) or count
    told_to = env.get(_SHARE, "").strip().lower() not in _NO
    return 0 < devices < int(env["LOCAL_WORLD_SIZE"]) and not told_to


def _wanted(env: Mapping[str, str]) -> tuple[int, ...]:
    """The devices that were asked for; also from outside, where nobody checked."""
    text = env.get(_DEVICES, "").strip()
    try:
        return parse_devices(text) if text else ()
    except ValueError as error:
        raise ClusterError(f"the variable {_DEVICES}={text!r}: {error}") from None


def _devices_there(count: int) -> str:
    if count:
        return "device 0 alone" if count == 1 else f"devices 0 to {count - 1}"
    reason = unavailable_reason("nccl")
    return "no GPU that can be used" + (f": {reason}" if reason else "")


def has_driver() -> bool:
    """Whether there is the driver of a GPU on this host."""
    return any(map(os.path.exists, GPU_DEVICES))


def load_cupy() -> Any | None:
    """cupy, if it is installed and there is a GPU to use it with."""
    # Importing it takes a second, in each engine: not for nothing.
    if not has_driver() or find_spec("cupy") is None:
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
