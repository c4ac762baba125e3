"""The GPUs that the ranks of a cluster use, as the user chose them."""

from __future__ import annotations

from dataclasses import dataclass

from ..wire.gpu_environment import DEVICES, SHARE_GPU

__all__ = ["Gpus"]


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
        """Return the variables for the engine of `rank`."""
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
