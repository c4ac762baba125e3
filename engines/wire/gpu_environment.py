"""The GPUs of the ranks, as a user chose them, and the variables that tell engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rankscope.backends.rank_sets import parse_runs

__all__ = ["DEVICES", "SHARE_GPU", "Gpus", "parse_devices"]

#: The GPUs of a host that its ranks take, as in ``0,2-3``.
DEVICES = "RANKSCOPE_DEVICES"
#: Whether several ranks may use one GPU.
SHARE_GPU = "RANKSCOPE_SHARE_GPU"
#: GPUs of a host at most: a longer run is a typing error.
_MOST = 1024


def parse_devices(devices: str | int | Iterable[int]) -> tuple[int, ...]:
    """Return the GPUs that `devices` names, as ``"0,2-3"`` or numbers; ``()``: all."""
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
    """The `devices` that ranks of each host use (none: all), shared or not.

    Sharing puts several ranks on one GPU, which NCCL refuses: their kernels wait for
    each other, and their messages go over loopback sockets. Sharing is for learning on
    a machine with one GPU; times measured there are no times of NCCL.
    """

    devices: tuple[int, ...] = ()
    share: bool = False

    def environment(self, rank: int) -> dict[str, str]:
        env = {}
        if self.devices:
            env[DEVICES] = ",".join(map(str, self.devices))
        if self.share:
            env[SHARE_GPU] = "1"
            # NCCL refuses two ranks of one host with one GPU, and identifies hosts
            # by this variable.
            env["NCCL_HOSTID"] = f"rankscope-rank-{rank}"
            # The ranks are on one host all the same. Loopback always connects them,
            # so the user's settings for networks are replaced; NVLink between hosts
            # would count their one GPU as two.
            env["NCCL_NET"] = "Socket"
            env["NCCL_SOCKET_IFNAME"] = "lo"
            env["NCCL_IB_DISABLE"] = "1"
            env["NCCL_MNNVL_ENABLE"] = "0"
        return env
