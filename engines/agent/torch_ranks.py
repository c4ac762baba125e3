"""A rank of ``torch.distributed`` in an engine: its environment, device and group.

The functions run on the engine's main thread, where the cells run: torch keeps the
current CUDA device by thread, and an import of torch takes seconds.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from importlib import import_module
from typing import Any

from rankscope.backends.groups.world import world
from rankscope.backends.torch_watch.stores import host_store, join_store

from ..wire.requests import TorchAnswer
from .agent import installed
from .gpus import Gpu, choose_device, may_share

__all__ = ["init_group", "load", "preload"]

#: Seconds that a request to the store of the default group may take.
STORE_TIMEOUT = 30.0

#: Set before torch is imported, where the user has not set them.
DEFAULTS = {
    # As torchrun does: the ranks of a host share its cores.
    "OMP_NUM_THREADS": "1",
    # A timeout or an error of NCCL ends the collective, not the process: 2 is
    # CleanUpOnly. The heartbeat monitor would end the process of a rank that hangs.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}

# The store of the default group, if this rank hosts it, until the group has it.
_hosted: Any = None


def preload() -> None:
    """Import torch, in a rank or before ranks are forked, as ranks want it."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    import_module("torch.distributed")


def load(host: str | None) -> str:
    """Import torch, set the cells' variables, and open the group's store on `host`."""
    global _hosted
    preload()
    import torch
    import torch.distributed as dist

    answer: TorchAnswer = {
        "version": str(torch.__version__),
        "gpus": torch.cuda.device_count(),
        "uuid": "",
        "may_share": may_share(os.environ),
        "port": 0,
        "missing": "",
    }
    if not dist.is_available():
        answer["missing"] = f"torch {torch.__version__} was built without distributed"
        return json.dumps(answer)
    agent = installed()
    index = choose_device(os.environ, answer["gpus"])
    device = torch.device("cpu")
    if index is not None:
        device = torch.device("cuda", index)
        gpu = Gpu.of_torch(torch, index)
        answer["uuid"] = gpu.uuid
        agent.use_gpu(gpu)
    # Hidden, as the agent's own: %who lists the user's names only.
    names = {"torch": torch, "dist": dist, "device": device}
    agent.shell.push(names, interactive=False)
    if host is not None:
        _hosted, answer["port"] = host_store(host, STORE_TIMEOUT)
    return json.dumps(answer)


def init_group(
    backend: str, timeout: float | None, host: str, port: int, rank: int, size: int
) -> None:
    """Make torch's default group over the store at `host` and `port`."""
    import torch.distributed as dist

    default = world.default
    if default is not None:
        import_module("rankscope.torch")  # registers the backend
        timeout = default.timeout
    global _hosted
    store, _hosted = _hosted or join_store(host, port, STORE_TIMEOUT), None
    dist.init_process_group(
        backend,
        timeout=None if timeout is None else timedelta(seconds=timeout),
        store=store,
        rank=rank,
        world_size=size,
    )
    # Aborted as on the others: this rank is fresh among them.
    if default is not None and default.aborted is not None:
        joining = import_module("rankscope.backends.torch_backend.joining")
        joining.begin(rank, in_cells=True)
