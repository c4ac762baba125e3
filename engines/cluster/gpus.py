"""The GPUs that a cluster's ranks were asked to use."""

from __future__ import annotations

from dataclasses import dataclass

from ..wire.gpu_environment import DEVICES, SHARE_GPU

__all__ = ["Gpus"]


@dataclass(frozen=True)
class Gpus:
    """The `devices` that ranks of each host take (none: all), shared or not.

    Sharing puts several ranks on one GPU, which NCCL refuses for good reasons: their
    kernels wait for each other, and their messages take the detour over loopback
    sockets. It is for learning on a machine with one GPU; nothing measured there says
    anything about NCCL.
    """

    devices: tuple[int, ...] = ()
    share: bool = False

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables for the engine of `rank`."""
        env = {}
        if self.devices:
            env[DEVICES] = ",".join(map(str, self.devices))
        if self.share:
            env[SHARE_GPU] = "1"
            # NCCL takes two ranks with one GPU for a mistake if they are on one
            # host, and identifies hosts by this variable.
            env["NCCL_HOSTID"] = f"rankscope-rank-{rank}"
            # The ranks are on one host all the same. Loopback always connects them,
            # so the user's settings for networks do not count here; NVLink between
            # hosts would take their one GPU for two.
            env["NCCL_SOCKET_IFNAME"] = "lo"
            env["NCCL_IB_DISABLE"] = "1"
            env["NCCL_MNNVL_ENABLE"] = "0"
        return env
