"""Arrays of a CUDA device, by cupy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .trial import Unclaimed

__all__ = ["DeviceArrays"]


class DeviceArrays:
    """cupy's arrays, on the device with the number of the rank."""

    wait_blocks_host = False

    def __init__(self, rank: int = 0) -> None:
        try:
            import cupy
        except ImportError:
            raise Unclaimed("cupy is not installed") from None
        self._cupy = cupy
        cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return an array with undefined content."""
        return self._cupy.empty(shape, np.dtype(dtype))

    def write(self, array: Any, values: npt.ArrayLike) -> None:
        """Set the content of `array`."""
        array[...] = self._cupy.asarray(values)

    def read(self, array: Any) -> npt.NDArray[Any]:
        """Return the content of `array`, after every op on the current stream."""
        found: npt.NDArray[Any] = array.get()
        return found
