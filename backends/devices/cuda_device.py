"""The CUDA device of this process: configured, current, or guessed."""

from __future__ import annotations

import os
import sys
from typing import Any

from .cuda_driver import Cuda

__all__ = [
    "assign_device",
    "configured_device",
    "device_index",
    "guess_device",
    "set_device",
    "use_driver",
]

_assigned: int | None = None
_set: int | None = None
_driver: Cuda | None = None


def set_device(index: int | None) -> None:
    """Set this process's CUDA device.

    ``None`` falls back to the device assigned by the launcher, then to the calling
    thread's current device.
    """
    global _set
    _set = index


def assign_device(index: int | None) -> None:
    """Store the device that the launcher assigned to this process."""
    global _assigned
    _assigned = index


def configured_device() -> int | None:
    """Return the index of `set_device`, else of `assign_device`, else ``None``."""
    return _assigned if _set is None else _set


def use_driver(driver: Cuda | None) -> None:
    """Make `guess_device` use `driver`; ``None`` if no driver is loaded."""
    global _driver
    _driver = driver


def guess_device() -> int | None:
    """Return the probable device of the calling thread's arrays.

    The result is the configured device, else the thread's current device, else
    ``LOCAL_RANK``, else ``None``.
    """
    configured = configured_device()
    if configured is not None:
        return configured
    current = None if _driver is None else _driver.current_device()
    if current is None and "cupy" in sys.modules:
        runtime = sys.modules["cupy"].cuda.runtime
        try:
            current = int(runtime.getDevice())
        except runtime.CUDARuntimeError:
            return None
    # LOCAL_RANK is a convention of launchers (torchrun and others): the rank among the
    # ranks of the host, which most programs use as the device.
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if current is None and local.isdigit() else current


def device_index(device_id: Any, where: str) -> int:
    """Return the index of `device_id`: a number, or a device of cupy or torch.

    Raises `TypeError` for a value of another type and `ValueError` for a device that
    is no CUDA device; `where` is the first part of the message.
    """
    kind = getattr(device_id, "type", "cuda")
    index = device_id
    if not isinstance(device_id, int):
        index = getattr(device_id, "index", getattr(device_id, "id", None))
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(
            f"{where}: device_id={device_id!r}; expected the number of a CUDA device, "
            "a cupy.cuda.Device or a torch.device with an index"
        )
    if kind != "cuda" or index < 0:
        raise ValueError(f"{where}: device_id={device_id!r}; expected a CUDA device")
    return index
