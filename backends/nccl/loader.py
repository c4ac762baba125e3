"""Loading of NCCL and CUDA, or of what stands in for them in tests."""

from __future__ import annotations

from collections.abc import Callable

from ..devices import cuda_device
from ..devices.cuda_driver import CudaLibrary
from ..errors import DistBackendError
from .interface import GpuApi
from .nccl4py import NcclLibrary, unavailable_reason

__all__ = ["load", "set_loader_for_tests"]


def _load_real() -> GpuApi:
    reason = unavailable_reason()
    if reason is not None:
        raise DistBackendError(f"the nccl backend cannot be used here: {reason}")

    return GpuApi(NcclLibrary(), CudaLibrary())


_loader: Callable[[], GpuApi] = _load_real
_api: GpuApi | None = None


def load() -> GpuApi:
    """Return NCCL and CUDA, loaded at the first call.

    Raises `DistBackendError`, with the remedy, if they cannot be used.
    """
    global _api
    if _api is None:
        _api = _loader()
        cuda_device.use_driver(_api.cuda)
    return _api


def set_loader_for_tests(loader: Callable[[], GpuApi] | None) -> None:
    """Have `load` return what ``loader()`` returns; ``None``: the libraries."""
    global _loader, _api
    _loader, _api = loader or _load_real, None
    cuda_device.use_driver(None)
