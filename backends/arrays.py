"""Arrays: what may be communicated, and the checks before any byte moves.

`where` says, once it is put into a message, which op of which group on which
rank was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["check_dtypes", "check_list", "check_size", "device_type", "native"]

# DLDeviceType of dlpack.h. Pinned host memory is host memory.
_DLPACK_DEVICES = {
    1: "cpu",
    2: "cuda",
    3: "cpu",
    4: "opencl",
    7: "vulkan",
    8: "metal",
    9: "vpi",
    10: "rocm",
    11: "cpu",
    12: "ext",
    13: "cuda",
    14: "oneapi",
    15: "webgpu",
    16: "hexagon",
    17: "maia",
}


def device_type(array: Any, argument: str, where: object) -> str:
    """Return the device type of `array`: the key that ops are dispatched by."""
    if type(array) is np.ndarray:
        return "cpu"
    if isinstance(array, np.generic) or not hasattr(array, "__dlpack_device__"):
        raise TypeError(
            f"{where}: {argument} is a {type(array).__name__}; expected an array "
            "that exports DLPack (numpy.ndarray, cupy.ndarray, a torch tensor)"
        )
    code = int(array.__dlpack_device__()[0])
    return _DLPACK_DEVICES.get(code, f"dlpack{code}")


def native(
    array: Any, device: str, argument: str, where: object, *, writable: bool = True
) -> Any:
    """Return `array` as the array type backends work on, sharing its memory.

    CPU arrays become `numpy.ndarray`. Raises `TypeError` for a dtype that is
    no number or a kind of array that cannot be shared, `ValueError` for an
    array that is not C-contiguous or, where it is written, read-only.
    """
    result = array
    if device == "cpu" and not isinstance(array, np.ndarray):
        try:
            result = np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TypeError(
                f"{where}: {argument} ({type(array).__name__}) cannot be shared "
                f"through DLPack: {error}"
            ) from error
    if device == "cuda" and type(array).__module__.partition(".")[0] == "torch":
        result = array = _of_cupy(array, argument, where)
    if device != "cpu":
        lacking = [n for n in ("shape", "dtype", "size") if not hasattr(array, n)]
        if lacking:
            raise TypeError(
                f"{where}: {argument} ({type(array).__name__}, on {device!r}) has no "
                f"{', '.join(lacking)}; expected an array with shape, dtype and size"
            )
    flags = getattr(result, "flags", None)
    if flags is not None:
        if isinstance(result, np.ndarray):
            if result.dtype.kind not in "biufc" or not result.dtype.isnative:
                raise TypeError(
                    f"{where}: {argument} has dtype {result.dtype}; expected bool, "
                    "an integer, a float or a complex dtype in native byte order"
                )
            if writable and not flags.writeable:
                raise ValueError(
                    f"{where}: {argument} is read-only; expected a writable array "
                    "(pass a copy: x.copy())"
                )
        if not flags.c_contiguous:
            raise ValueError(
                f"{where}: {argument} (shape {tuple(result.shape)}, strides "
                f"{tuple(result.strides)}) is not C-contiguous; pass "
                "numpy.ascontiguousarray(x)"
            )
    return result


def _of_cupy(tensor: Any, argument: str, where: object) -> Any:
    """A CUDA tensor of torch as a cupy array that shares its memory."""
    try:
        import cupy

        return cupy.from_dlpack(tensor)
    except (BufferError, ImportError, RuntimeError, TypeError) as error:
        raise TypeError(
            f"{where}: {argument} (a torch tensor on CUDA) cannot be shared with cupy "
            f"through DLPack: {error}"
        ) from error


def check_dtypes(
    arrays: Sequence[Any], arguments: Sequence[str], where: object
) -> None:
    """Raise `TypeError` unless all `arrays` have the dtype of the first."""
    first = arrays[0].dtype
    for array, argument in zip(arrays, arguments, strict=True):
        if array.dtype != first:
            raise TypeError(
                f"{where}: {argument} has dtype {array.dtype}, {arguments[0]} has "
                f"{first}; expected one dtype"
            )


def check_list(value: Any, argument: str, length: int, where: object) -> None:
    """Raise unless `value` is a list or tuple with one entry per rank."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"{where}: {argument} is a {type(value).__name__}; expected a list of "
            f"{length} arrays, one per rank of the group"
        )
    if len(value) != length:
        raise ValueError(
            f"{where}: {argument} has {len(value)} entries; expected {length}, one "
            "per rank of the group"
        )


def check_size(
    array: Any, argument: str, expected: int, why: str, where: object
) -> None:
    """Raise `ValueError` unless `array` has `expected` elements."""
    if array.size != expected:
        raise ValueError(
            f"{where}: {argument} (shape {tuple(array.shape)}) has {array.size} "
            f"elements; expected {expected}: {why}"
        )
