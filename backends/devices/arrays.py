"""The checks of the arrays of an op, before any byte is moved.

`str(where)` names the op, the group and the rank, and is the first part of each
error message. `argument` is the name of the array's parameter.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cuda_context import cuda_contexts
from .cuda_install import install_command
from .torch_memory import host_array

__all__ = [
    "DEVICE_TYPES",
    "Float8",
    "Float8Array",
    "check_list",
    "device_type",
    "is_device_type",
    "native",
]

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

# numpy's arrays that are nothing but their data.
_PLAIN = (np.ndarray, np.memmap)

#: The device types that have a name in DLPack.
DEVICE_TYPES = tuple(dict.fromkeys(_DLPACK_DEVICES.values()))


def is_device_type(name: str) -> bool:
    """Return whether `device_type` can return `name`."""
    number = name.removeprefix("dlpack")
    return name in DEVICE_TYPES or (number != name and number.isdecimal())


def device_type(array: Any, argument: str, where: object) -> str:
    """Return the device type of `array`, which selects the backend of an op."""
    if type(array) is np.ndarray:
        return "cpu"
    if isinstance(array, np.generic) or not hasattr(array, "__dlpack_device__"):
        wrap = ""
        if hasattr(array, "__cuda_array_interface__"):
            wrap = "; wrap it: cupy.asarray(x)"
        raise TypeError(
            f"{where}: {argument} is a {type(array).__name__}; expected an array "
            f"that exports DLPack (numpy.ndarray, cupy.ndarray, a torch tensor){wrap}"
        )
    try:
        code = int(array.__dlpack_device__()[0])
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        # A tensor of torch on "meta", which has no memory, or in a layout of MKL-DNN.
        raise TypeError(
            f"{where}: {argument} ({type(array).__name__}) cannot be shared through "
            f"DLPack: {error}"
        ) from error
    return _DLPACK_DEVICES.get(code, f"dlpack{code}")


def native(
    array: Any, device: str, argument: str, where: object, *, writable: bool = True
) -> Any:
    """Return `array` as numpy's, or cupy's if it is installed, of the same memory."""
    if getattr(array, "requires_grad", False) and _library_of(array) == "torch":
        # As torch's collectives: the data, of which the graph learns nothing.
        array = array.detach()
    result = array
    if not isinstance(array, np.ndarray):
        if device == "cpu":
            result = _of_numpy(array, argument, where)
        elif device == "cuda":
            result = _of_cupy(array, argument, where)
            if writable and result is not array and _is_read_only(array):
                raise ValueError(_read_only(argument, "cupy.array(x)", where))
    elif device == "cpu" and type(array) not in _PLAIN:
        name = type(array).__name__
        copy = " or x.filled(value)" if isinstance(array, np.ma.MaskedArray) else ""
        raise TypeError(
            f"{where}: {argument} is a {name}, of which a collective knows the data "
            f"alone, and not what {name} makes of them (a mask, a unit, a shape); pass "
            f"numpy.asarray(x){copy}"
        )
    if device != "cpu":
        lacking = [n for n in ("shape", "dtype", "size") if not hasattr(result, n)]
        if lacking:
            raise TypeError(
                f"{where}: {argument} ({type(array).__name__}, on {device!r}) has no "
                f"{', '.join(lacking)}; expected an array with shape, dtype and size"
            )
    flags = getattr(result, "flags", None)
    if flags is not None:
        if isinstance(result, np.ndarray):
            if not _is_numeric(result.dtype):
                raise TypeError(
                    f"{where}: {argument} has dtype {result.dtype}; expected bool, "
                    "an integer, a float or a complex dtype in native byte order"
                )
            if writable and not flags.writeable:
                raise ValueError(_read_only(argument, "x.copy()", where))
        if not flags.c_contiguous:
            torch = _library_of(array) == "torch"
            library = "cupy" if device == "cuda" else "numpy"
            raise ValueError(
                f"{where}: {argument} (shape {tuple(result.shape)}, strides "
                f"{tuple(result.strides)}) is not C-contiguous; pass "
                f"{'x.contiguous()' if torch else f'{library}.ascontiguousarray(x)'}"
            )
    return result


def _is_numeric(dtype: np.dtype) -> bool:
    if dtype.kind in "biufc":
        return dtype.isnative
    # The dtype of the package ml_dtypes; its float8 dtypes have no reductions.
    return dtype.kind == "V" and dtype.name == "bfloat16"


def _library_of(array: Any) -> str:
    """Return the name of the top-level package of the type of `array`."""
    return type(array).__module__.partition(".")[0]


def _read_only(argument: str, copy: str, where: object) -> str:
    """Return the message for a read-only array; `copy` is the remedy, as code."""
    return (
        f"{where}: {argument} is read-only; expected a writable array, since the "
        f"result is written into it: make a copy, pass it and keep it (x = {copy})"
    )


def _of_numpy(array: Any, argument: str, where: object) -> Any:
    """Return a CPU array of another library as a numpy array of the same memory."""
    try:
        if _library_of(array) != "torch":
            return np.from_dlpack(array)
        if str(array.dtype) == "torch.bfloat16":
            return _of_bfloat16(array, argument, where)
        # The DLPack of older versions of torch does not say that it is writable.
        return host_array(array)
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(
            f"{where}: {argument} ({type(array).__name__}) cannot be shared "
            f"with numpy: {error}"
        ) from error


def _of_bfloat16(tensor: Any, argument: str, where: object) -> Any:
    """Return a bfloat16 tensor of torch as an array of ml_dtypes' dtype."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise TypeError(
            f"{where}: {argument} is a bfloat16 tensor, whose dtype numpy has with the "
            "package ml_dtypes, which is not installed: pip install ml_dtypes"
        ) from error
    # numpy has no bfloat16 of its own; its bits pass as integers.
    bits = host_array(tensor.view(sys.modules["torch"].int16))
    return bits.view(ml_dtypes.bfloat16)


def _of_cupy(array: Any, argument: str, where: object) -> Any:
    """Return a CUDA array of another library as a cupy array of the same memory.

    Returns `array` itself if `array` does not export DLPack, or if cupy is not
    installed: the error of the backend then names the missing package.
    """
    loaded: Any = sys.modules.get("cupy")
    ours = Float8Array if loaded is None else (Float8Array, loaded.ndarray)
    if isinstance(array, ours):
        return array
    if not hasattr(array, "__dlpack__"):
        return array
    try:
        import cupy
    except ImportError as error:
        # No backend can use a torch tensor: its `size` is a method, not a number.
        if _library_of(array) != "torch":
            return array
        raise TypeError(
            f"{where}: {argument} (a torch tensor on CUDA) needs cupy, which is not "
            f"installed: {install_command()}"
        ) from error
    float8 = _FLOAT8.get(str(array.dtype)) if _library_of(array) == "torch" else None
    try:
        with _on_device_of(array):
            if float8 is not None:
                as_bytes = array.view(sys.modules["torch"].uint8)
                return Float8Array(cupy.from_dlpack(as_bytes), float8)
            return cupy.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        what = "torch tensor" if _library_of(array) == "torch" else type(array).__name__
        raise TypeError(
            f"{where}: {argument} (a {what} on CUDA) cannot be shared with cupy "
            f"through DLPack: {error}"
        ) from error


def _on_device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Make the device of `array` the calling thread's device within a block.

    cupy.from_dlpack sets the device by the CUDA runtime and then restores the one
    before: on a thread that chose none, this creates a context on device 0.
    """
    try:
        contexts = cuda_contexts()
    except (ImportError, RuntimeError):
        # cupy alone is installed, or there is no driver, which cupy reports.
        return contextlib.nullcontext()
    return contexts.device(int(array.__dlpack_device__()[1]))


def _is_read_only(array: Any) -> bool:
    """Return whether `array` is read-only, as jax's arrays; cupy does not check."""
    # All torch tensors are writable, and some torch dtypes lack the interface.
    if _library_of(array) == "torch":
        return False
    interface = getattr(array, "__cuda_array_interface__", None)
    return interface is not None and bool(interface["data"][1])


def check_list(
    value: Any, argument: str, length: int, where: object, *, replaced: bool = False
) -> None:
    """Raise unless `value` is a list of `length` entries, one per rank."""
    if not isinstance(value, list if replaced else (list, tuple)):
        raise TypeError(
            f"{where}: {argument} is a {type(value).__name__}; expected a list of "
            f"{length} entries, one per rank of the group"
        )
    if len(value) != length:
        raise ValueError(
            f"{where}: {argument} has {len(value)} entries; expected {length}, one "
            "per rank of the group"
        )


# torch's float8 dtypes: cupy has none, so that the data are bytes.


@dataclass(frozen=True)
class Float8:
    """The attributes of `numpy.dtype` that the backends use; `itemsize` is in bytes."""

    name: str
    kind: str = "V"
    itemsize: int = 1

    def __str__(self) -> str:
        return self.name


_FLOAT8 = {
    "torch.float8_e4m3fn": Float8("float8_e4m3fn"),
    "torch.float8_e5m2": Float8("float8_e5m2"),
}


class Float8Array:
    """An array of `dtype` that uses the memory of `data`, an array of bytes."""

    def __init__(self, data: Any, dtype: Float8) -> None:
        self._bytes, self.dtype = data, dtype

    def __getitem__(self, index: Any) -> Float8Array:
        return Float8Array(self._bytes[index], self.dtype)

    def reshape(self, *shape: Any) -> Float8Array:
        return Float8Array(self._bytes.reshape(*shape), self.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bytes, name)
