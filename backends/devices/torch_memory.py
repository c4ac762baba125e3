"""The memory of a tensor of torch on the host, as a numpy array."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

__all__ = ["host_array", "shared_array"]

# Those that torch has with these names; ml_dtypes adds further names to numpy's.
_NAMES = {np.dtype(code).name for code in "?bBhHiIqQefdFD"}


class _Memory:
    """What numpy takes for an array; the array keeps it, and so the tensor, alive."""

    def __init__(self, tensor: Any, interface: dict[str, Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = interface


@functools.cache
def _typestr(dtype: Any) -> str | None:
    """Return numpy's string for a dtype of torch, ``None`` if numpy lacks it."""
    name = str(dtype).removeprefix("torch.")
    return np.dtype(name).str if name in _NAMES else None


def host_array(tensor: Any) -> Any:
    """Return an array with the memory of `tensor`, whose storage stays resizable.

    ``tensor.numpy()`` forbids for good that the storage is resized, as FSDP1 does after
    each all_gather. Raises what ``tensor.numpy()`` raises for a tensor that numpy
    cannot share (`RuntimeError`, `TypeError`), and `RuntimeError` where the storage has
    been freed.
    """
    array = None if tensor.requires_grad else shared_array(tensor)
    return tensor.numpy() if array is None else array


def shared_array(tensor: Any) -> Any:
    """Return `host_array` of a tensor; it may require a gradient.

    ``None``: only ``tensor.numpy()`` knows whether there is one.
    """
    torch = sys.modules["torch"]
    typestr = _typestr(tensor.dtype)
    if (
        typestr is None
        or type(tensor) is not torch.Tensor
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return None
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise RuntimeError("its storage has no memory: it was freed, or never filled")
    strides = None
    if not tensor.is_contiguous():
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "typestr": typestr,
        "data": (address, False),
        "strides": strides,
    }
    return np.asarray(_Memory(tensor, interface))
