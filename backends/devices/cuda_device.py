"""The CUDA device of this process: configured, current, or guessed."""

from __future__ import annotations

import numbers
import os
import sys
from typing import Any

from ..errors import LibraryFailure
from .cuda_context import cuda_contexts
from .cuda_driver import Cuda

__all__ = [
    "assign_device",
    "bound_device",
    "chosen_device",
    "configured_device",
    "device_index",
    "local_device",
    "set_device",
    "use_driver",
]

_assigned: int | None = None
_set: int | None = None
_driver: Cuda | None = None


def set_device(index: int | None) -> None:
    """Set this process's CUDA device; ``None``: the launcher's, or the thread's own."""
    global _set
    _set = index


def assign_device(index: int | None) -> None:
    """Store the device that the launcher assigned to this process."""
    global _assigned
    _assigned = index


def bound_device() -> int | None:
    """Return the index of `set_device`, if any: the choice of the user's own code."""
    return _set


def configured_device() -> int | None:
    """Return the index of `set_device`, else of `assign_device`, else ``None``."""
    return _assigned if _set is None else _set


def use_driver(driver: Cuda | None) -> None:
    """Make `chosen_device` use `driver`; ``None`` if no driver is loaded."""
    global _driver
    _driver = driver


def chosen_device() -> int | None:
    """Return the configured device, else the thread's current one, else ``None``."""
    configured = configured_device()
    if configured is not None:
        return configured
    if _driver is not None:
        return _driver.current_device()
    if "cupy" not in sys.modules and "torch" not in sys.modules:
        return None
    try:
        return cuda_contexts().current_device()
    except (ImportError, LibraryFailure, RuntimeError):
        # There are no bindings of the driver, or there is no driver (RuntimeError).
        return None


def local_device(count: int) -> int:
    """Return the probable device, of `count`, of a process that chose none."""
    # LOCAL_RANK is a convention of launchers (torchrun and others): the rank among the
    # ranks of the host. A launcher that shows each rank one GPU (Slurm) makes it
    # device 0 of every rank.
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) % count if count and local.isdigit() else 0


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def device_index(device_id: Any, where: str) -> int:
    """Return the index of `device_id`: a number, or a device of cupy or torch."""
    kind = getattr(device_id, "type", "cuda")
    # numpy's integers are no int.
    index = int(device_id) if _is_integer(device_id) else device_id
    if not isinstance(index, int):
        index = getattr(device_id, "index", getattr(device_id, "id", None))
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(
            f"{where}: device_id={device_id!r}; expected the number of a CUDA device, "
            "a cupy.cuda.Device or a torch.device with an index"
        )
    if kind != "cuda" or index < 0:
        raise ValueError(f"{where}: device_id={device_id!r}; expected a CUDA device")
    return index
