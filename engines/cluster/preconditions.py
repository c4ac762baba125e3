"""What the ranks would lack: refused before any of them starts."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from rankscope.backends import BackendConfig
from rankscope.backends.devices.cuda_install import has_driver
from rankscope.backends.groups.config import default_instead, why_unusable

from ..errors import ClusterStartError
from ..wire.torch_environment import TorchOptions
from . import torch_start

__all__ = ["check_backend", "check_folder", "check_torch", "torch_options"]


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
    if options is not None and backend:
        raise ValueError(
            f"backend={backend!r} is for Rankscope's default group, which is not made "
            "on ranks of torch: name the backend of torch's group, as in "
            f"--torch {backend} (torch={backend!r})"
        )
    return options


def check_torch() -> None:
    """Raise `ClusterStartError` where the ranks would find no torch."""
    if find_spec("torch") is None:
        raise ClusterStartError(
            f"torch is not installed in {sys.executable}, which the ranks run on: "
            f"{torch_start.INSTALL}"
        )
