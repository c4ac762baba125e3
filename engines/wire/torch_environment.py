"""The variables that torchrun sets, and how ranks of ``torch.distributed`` begin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = ["TorchOptions", "torchrun_variables"]

_BACKEND = re.compile(r"[a-z][a-z0-9_]*")
_GRAMMAR = (
    "expected a backend of torch ('gloo', 'nccl', 'rankscope') or device:backend pairs "
    "('cpu:gloo,cuda:nccl'), each device once"
)


@dataclass(frozen=True)
class TorchOptions:
    """How the ranks of a cluster use ``torch.distributed``."""

    #: Of torch's default group; empty: gloo for CPU tensors, and NCCL for CUDA tensors
    #: where every rank has a GPU.
    backend: str = ""
    #: What tells this run of torch's programs from others: the cluster's id.
    run_id: str = ""
    #: How often ranks were restarted.
    restarts: int = 0

    @classmethod
    def parse(cls, torch: bool | str) -> TorchOptions | None:
        """Return the options that the argument `torch` means; ``None``: ``False``."""
        if isinstance(torch, bool):
            return cls() if torch else None
        parts = [part.strip() for part in torch.split(",")]
        pairs = [part.split(":") for part in parts]
        names = [name for pair in pairs for name in pair]
        single = len(parts) == 1 and len(pairs[0]) == 1
        devices = {pair[0] for pair in pairs}
        if not all(map(_BACKEND.fullmatch, names)) or not (
            single or {len(pair) for pair in pairs} == {2}
        ):
            raise ValueError(f"torch={torch!r}: {_GRAMMAR}")
        if len(devices) < len(pairs):
            raise ValueError(f"torch={torch!r}: a device is named twice; {_GRAMMAR}")
        return cls(",".join(parts))

    @property
    def over_rankscope(self) -> bool:
        """Whether a group of Rankscope does the ops of torch's default group."""
        return "rankscope" in re.split("[:,]", self.backend)

    def of_run(self, run_id: str) -> TorchOptions:
        return replace(self, run_id=run_id)

    def restarted(self) -> TorchOptions:
        return replace(self, restarts=self.restarts + 1)


def torchrun_variables(
    options: TorchOptions, env: Mapping[str, str], hosts: int
) -> dict[str, str]:
    """Return what torchrun sets besides ``RANK`` and the like, which `env` has."""
    return {
        "GROUP_WORLD_SIZE": str(hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": env["RANK"],
        "ROLE_WORLD_SIZE": env["WORLD_SIZE"],
        "TORCHELASTIC_RUN_ID": options.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(options.restarts),
        # Nothing limits it; programs read a number.
        "TORCHELASTIC_MAX_RESTARTS": str(2**31 - 1),
        # With True, env:// would connect to a store of torchrun's agent at MASTER_PORT
        # and wait for it. Rank 0 hosts that store when a program uses env://.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
