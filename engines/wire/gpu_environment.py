"""The variables by which the notebook names the GPUs of each rank to its engine."""

from __future__ import annotations

from collections.abc import Iterable

from rankscope.backends.rank_sets import parse_runs

__all__ = ["DEVICES", "SHARE_GPU", "parse_devices"]

#: The GPUs of a host that its ranks take, as in ``0,2-3``.
DEVICES = "RANKSCOPE_DEVICES"
#: Whether several ranks may use one GPU.
SHARE_GPU = "RANKSCOPE_SHARE_GPU"
#: GPUs of a host at most: a longer run is a typing error.
_MOST = 1024


def parse_devices(devices: str | int | Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of the GPUs that `devices` names, in its order.

    A text such as ``"0,2-3"``, or one or several numbers; no number at all means all
    GPUs, ``()``. Raises `ValueError` for what is not the number of a GPU, and for a GPU
    that is named twice.
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
