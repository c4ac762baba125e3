"""CUDA as the NCCL backend needs it: arrays by cupy, streams and events by the driver.

cupy's ``Event.done`` holds the GIL and hides errors, so events go through
``cuda.bindings``. cupy decides which context is current: the primary one of
its device, which torch uses as well.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from .nccl_seam import LibraryFailure

__all__ = ["CudaLibrary"]

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_TIMED, _UNTIMED = 0, 2  # CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING


class CudaLibrary:
    """The real `nccl_seam.Cuda`."""

    def __init__(self) -> None:
        import cupy
        from cuda.bindings import driver

        self._cupy, self._driver = cupy, driver
        self._success = driver.CUresult.CUDA_SUCCESS
        self._not_ready = driver.CUresult.CUDA_ERROR_NOT_READY

    def current_device(self) -> int:
        return int(self._runtime("getDevice"))

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before = self._runtime("getDevice")
        self.use(index)
        try:
            yield
        finally:
            if before != index:
                self._runtime("setDevice", before)

    def use(self, index: int) -> None:
        # Also where it is the current one already: it makes the device's context
        # current on this thread, which the driver's calls need.
        self._runtime("setDevice", index)

    def _runtime(self, name: str, *arguments: Any) -> Any:
        runtime = self._cupy.cuda.runtime
        try:
            return getattr(runtime, name)(*arguments)
        except runtime.CUDARuntimeError as error:
            raise LibraryFailure(f"CUDA reports: {error}") from error

    def current_streams(self, index: int) -> tuple[int, ...]:
        streams = {int(self._cupy.cuda.get_current_stream(index).ptr)}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            # Arrays that came from torch are computed on its own stream.
            streams.add(int(torch.cuda.current_stream(index).cuda_stream))
        return tuple(streams)

    def capturing(self, stream: int) -> bool:
        (status,) = self._do(self._driver.cuStreamIsCapturing(stream))
        return bool(status != self._driver.CUstreamCaptureStatus(0))

    def new_stream(self) -> int:
        (stream,) = self._do(self._driver.cuStreamCreate(_NON_BLOCKING))
        return int(stream)

    def free_stream(self, stream: int) -> None:
        self._do(self._driver.cuStreamDestroy(stream))

    def new_event(self, *, timed: bool) -> Any:
        (event,) = self._do(self._driver.cuEventCreate(_TIMED if timed else _UNTIMED))
        return event

    def free_event(self, event: Any) -> None:
        self._do(self._driver.cuEventDestroy(event))

    def record(self, event: Any, stream: int) -> None:
        self._do(self._driver.cuEventRecord(event, stream))

    def wait(self, stream: int, event: Any) -> None:
        self._do(self._driver.cuStreamWaitEvent(stream, event, 0))

    def reached(self, event: Any) -> bool:
        (result,) = self._driver.cuEventQuery(event)
        if result == self._not_ready:
            return False
        self._do((result,))
        return True

    def elapsed_ms(self, start: Any, end: Any) -> float:
        (elapsed,) = self._do(self._driver.cuEventElapsedTime(start, end))
        return float(elapsed)

    def capability(self, index: int) -> tuple[int, int]:
        number = int(self._cupy.cuda.Device(index).compute_capability)
        return divmod(number, 10)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def device_of(self, array: Any) -> int:
        return int(array.device.id)

    def scratch(self) -> Any:
        return self._cupy.zeros(1, self._cupy.float32)

    def _do(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the driver returned besides its result; raises a bad result."""
        result, *values = answer
        if result != self._success:
            _, text = self._driver.cuGetErrorString(result)
            said = text.decode() if isinstance(text, bytes) else str(result)
            raise LibraryFailure(f"CUDA reports: {said} ({result.name})")
        return tuple(values)
