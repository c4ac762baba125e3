"""Which CUDA device this process uses: told, seen, or guessed from ``LOCAL_RANK``."""

from __future__ import annotations

import os
import sys
from typing import Any

from . import nccl_seam

__all__ = ["index_of", "likely_device", "own_device", "set_own_device"]

_seat: int | None = None
_told: int | None = None


def set_own_device(index: int | None, *, seat: bool = False) -> None:
    """Say which it is, ``None``: that of its seat, else what is current on a thread.

    With `seat`, it is that of the process's seat in a cluster.
    """
    global _seat, _told
    if seat:
        _seat = index
    else:
        _told = index


def own_device() -> int | None:
    """Its index, or ``None`` if nobody has said."""
    return _seat if _told is None else _told


def likely_device() -> int | None:
    """The one that arrays of this thread's caller will lie on, as far as is known."""
    told = own_device()
    if told is not None:
        return told
    seen = nccl_seam.current_device()
    if seen is None and "cupy" in sys.modules:
        runtime = sys.modules["cupy"].cuda.runtime
        try:
            seen = int(runtime.getDevice())
        except runtime.CUDARuntimeError:
            return None
    # Nobody has chosen yet: as launchers want it.
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if seen is None and local.isdigit() else seen


def index_of(device_id: Any, where: str) -> int:
    """The index that `device_id` stands for: a number, or a device of cupy or torch.

    Raises `TypeError` for anything else, `ValueError` if it is no CUDA device.
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
