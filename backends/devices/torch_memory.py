"""The memory of a tensor of torch on the host, as a numpy array."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

__all__ = ["host_array", "shared_array"]

# Those that torch has with these names; ml_dtypes adds further names to numpy's.
_NAMES = {np.dtype(code).name for code in "?bBhHiIqQefdFD"}


@functools.cache
def _numpys(dtype: Any) -> np.dtype[Any] | None:
    """Return numpy's dtype for one of torch, ``None`` if numpy lacks it."""
    name = str(dtype).removeprefix("torch.")
    return np.dtype(name) if name in _NAMES else None


@functools.lru_cache(maxsize=1024)
def _memory_type(nbytes: int) -> Any:
    """Return a type of so much memory; ctypes would make it anew for each tensor."""
    return ctypes.c_char * nbytes


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
    if (
        type(tensor) is not torch.Tensor
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or (dtype := _numpys(tensor.dtype)) is None
    ):
        return None
    address, count = tensor.data_ptr(), tensor.numel()
    if not address and count:
        raise RuntimeError("its storage has no memory: it was freed, or never filled")
    strides = None
    if count and not tensor.is_contiguous():
        steps = tensor.stride()
        strides = [step * dtype.itemsize for step in steps]
        ends = zip(tensor.shape, steps, strict=True)
        count = 1 + sum((size - 1) * step for size, step in ends)
    # The array keeps the memory, and so the tensor. An op by `__array_interface__` took
    # a microsecond more.
    memory = _memory_type(count * dtype.itemsize).from_address(address)
    memory.tensor = tensor
    return np.ndarray(tensor.shape, dtype, memory, 0, strides)
