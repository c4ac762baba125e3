"""The memory of a GPU, by NVML.

NVML is no part of CUDA: it creates no context on the GPU, and it answers while a kernel
hangs. ``cudaMemGetInfo`` needs a context, and may wait for a lock of the CUDA driver
that another thread keeps until the kernel ends.
"""

from __future__ import annotations

import logging
from typing import Any

from .cuda_context import cuda_contexts

__all__ = ["GpuMemory"]

_log = logging.getLogger(__name__)


class GpuMemory:
    """The memory of the CUDA device `index`.

    Where NVML cannot be used, `read` returns ``None``.
    """

    def __init__(self, index: int) -> None:
        self._nvml: Any = None
        try:
            from cuda.bindings import nvml

            nvml.init_v2()
            self._handle = _find(nvml, cuda_contexts().uuid(index))
        # The bindings have no common base for a missing library and an error of NVML.
        except Exception as error:  # noqa: BLE001
            _log.info("the memory of GPU %d is not known: %s", index, error)
        else:
            self._nvml = nvml

    def read(self) -> tuple[int, int] | None:
        """Return how many bytes all processes use, and how many there are."""
        if self._nvml is None:
            return None
        try:
            memory = self._nvml.device_get_memory_info_v2(self._handle)
        except self._nvml.NvmlError as error:
            _log.info("NVML does not say how much memory is used: %s", error)
            return None
        return int(memory.used), int(memory.total)


def _find(nvml: Any, uuid: str) -> int:
    """Return NVML's handle of the GPU, or of the part of a GPU (MIG), `uuid`."""
    try:
        return int(nvml.device_get_handle_by_uuid(f"GPU-{uuid}"))
    except nvml.NotFoundError:
        return int(nvml.device_get_handle_by_uuid(f"MIG-{uuid}"))
