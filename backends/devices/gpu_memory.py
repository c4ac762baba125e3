"""The memory of a GPU, by NVML.

NVML is no part of CUDA: it creates no context on the GPU, and it answers while a kernel
hangs. ``cudaMemGetInfo`` needs a context, and may wait for a lock of the CUDA driver
that another thread keeps until the kernel ends.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

from .cuda_context import cuda_contexts

__all__ = ["GpuMemory", "GpuUse"]

_log = logging.getLogger(__name__)

#: NVML_VALUE_NOT_AVAILABLE: the driver does not account for processes.
_NOT_AVAILABLE = 2**64 - 1


class GpuUse(NamedTuple):
    """The memory of a GPU, in bytes; ``None`` where it is not known."""

    #: What all processes hold.
    used: int | None = None
    total: int | None = None
    #: What this process holds.
    own: int | None = None


class GpuMemory:
    """The memory of the CUDA device `index`."""

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

    def read(self) -> GpuUse | None:
        """Return how much all processes hold, how much there is, and the own part."""
        if self._nvml is None:
            return None
        try:
            memory = self._nvml.device_get_memory_info_v2(self._handle)
        except self._nvml.NvmlError as error:
            _log.info("NVML does not say how much memory is used: %s", error)
            return None
        return GpuUse(int(memory.used), int(memory.total), self._own())

    def _own(self) -> int | None:
        """Return how many bytes this process holds: arrays, context, NCCL's buffers.

        ``None`` where NVML does not list it: it has no context on the GPU, or it is in
        a container, and NVML knows it by another number.
        """
        try:
            listed = self._nvml.device_get_compute_running_processes_v3(self._handle)
        except self._nvml.NvmlError as error:
            _log.info("NVML does not say what each process holds: %s", error)
            return None
        pid = os.getpid()
        sizes = [
            int(process.used_gpu_memory)
            for process in (listed[place] for place in range(len(listed)))
            if int(process.pid) == pid
        ]
        return sum(sizes) if sizes and _NOT_AVAILABLE not in sizes else None


def _find(nvml: Any, uuid: str) -> int:
    """Return NVML's handle of the GPU, or of the part of a GPU (MIG), `uuid`."""
    try:
        return int(nvml.device_get_handle_by_uuid(f"GPU-{uuid}"))
    except nvml.NotFoundError:
        return int(nvml.device_get_handle_by_uuid(f"MIG-{uuid}"))
