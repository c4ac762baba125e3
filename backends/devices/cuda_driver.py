"""CUDA for the NCCL backend: arrays by cupy, streams and events by the CUDA driver.

cupy's ``Event.done`` holds the GIL and hides errors, so the backend uses events
through ``cuda.bindings``. cupy and torch use the primary context of a device, as the
backend does, so all of them share arrays and streams.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Protocol

from .cuda_context import CudaContexts

__all__ = ["Cuda", "CudaLibrary"]

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_TIMED, _UNTIMED = 0, 2  # CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING


#: An event of CUDA, opaque to the callers.
Handle = Any


class Cuda(Protocol):
    """The calls of CUDA that the backend uses; one of them waits for the device.

    Streams and addresses are integers. A failed call raises `LibraryFailure`.
    """

    def current_device(self) -> int | None:
        """Return the calling thread's current device; ``None`` if it chose none."""

    def device_count(self) -> int:
        """Return the number of devices that this process may use."""

    def device(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Make `index` the calling thread's device within the block."""

    def use(self, index: int) -> None:
        """Do `CudaContexts.use`."""

    def current_streams(self, index: int) -> tuple[int, ...]:
        """Return the current streams of cupy and torch on the device `index`."""

    def capturing(self, stream: int) -> bool:
        """Return whether a CUDA graph is being captured on `stream`."""

    def new_stream(self, *, high_priority: bool = False) -> int:
        """Create a stream that is not synchronized with the legacy default stream."""

    def free_stream(self, stream: int) -> None: ...

    def new_event(self, *, timed: bool) -> Handle:
        """Create an event; the record of a `timed` event costs more."""

    def free_event(self, event: Handle) -> None: ...

    def record(self, event: Handle, stream: int) -> None:
        """Record `event` on `stream`, after the work submitted to `stream` so far."""

    def wait(self, stream: int, event: Handle) -> None:
        """Make the work submitted to `stream` from now on wait for `event`."""

    def reached(self, event: Handle) -> bool:
        """Return whether `event` was reached; an error of the device is raised."""

    def elapsed_ms(self, start: Handle, end: Handle) -> float:
        """Return the milliseconds between two timed events, both reached."""

    def capability(self, index: int) -> tuple[int, int]:
        """Return the compute capability of a device, for instance ``(9, 0)``."""

    def address(self, array: Any) -> int:
        """Return the address of the elements of `array`."""

    def device_of(self, array: Any) -> int:
        """Return the device that `array` is on."""

    def scratch(self) -> Any:
        """Return a new array of one float32 on the current device; any value."""

    def has_more(self, array: Any, unsigned: str, mask: int, most: int) -> bool:
        """Return whether an element's bits in `mask` are a number of more than `most`.

        `unsigned` is the dtype of the bits. The only call that waits for the device:
        for what the current streams have been given so far.
        """


class CudaLibrary(CudaContexts):
    """`Cuda` implemented with cupy and cuda-bindings; `Cuda` documents the methods."""

    def __init__(self) -> None:
        import cupy
        from cuda.bindings import driver

        super().__init__(driver)
        self._cupy = cupy
        self._not_ready = driver.CUresult.CUDA_ERROR_NOT_READY

    def current_streams(self, index: int) -> tuple[int, ...]:
        streams = {int(self._cupy.cuda.get_current_stream(index).ptr)}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            # torch computes on a current stream of its own.
            streams.add(int(torch.cuda.current_stream(index).cuda_stream))
        return tuple(streams)

    def capturing(self, stream: int) -> bool:
        (status,) = self.check(self._driver.cuStreamIsCapturing(stream))
        return bool(status != self._driver.CUstreamCaptureStatus(0))

    def new_stream(self, *, high_priority: bool = False) -> int:
        driver = self._driver
        if not high_priority:
            (stream,) = self.check(driver.cuStreamCreate(_NON_BLOCKING))
            return int(stream)
        _, highest = self.check(driver.cuCtxGetStreamPriorityRange())
        made = driver.cuStreamCreateWithPriority(_NON_BLOCKING, highest)
        (stream,) = self.check(made)
        return int(stream)

    def free_stream(self, stream: int) -> None:
        self.check(self._driver.cuStreamDestroy(stream))

    def new_event(self, *, timed: bool) -> Any:
        (event,) = self.check(self._driver.cuEventCreate(_TIMED if timed else _UNTIMED))
        return event

    def free_event(self, event: Any) -> None:
        self.check(self._driver.cuEventDestroy(event))

    def record(self, event: Any, stream: int) -> None:
        self.check(self._driver.cuEventRecord(event, stream))

    def wait(self, stream: int, event: Any) -> None:
        self.check(self._driver.cuStreamWaitEvent(stream, event, 0))

    def reached(self, event: Any) -> bool:
        (result,) = self._driver.cuEventQuery(event)
        if result == self._not_ready:
            return False
        self.check((result,))
        return True

    def elapsed_ms(self, start: Any, end: Any) -> float:
        (elapsed,) = self.check(self._driver.cuEventElapsedTime(start, end))
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

    def has_more(self, array: Any, unsigned: str, mask: int, most: int) -> bool:
        # The array may have been computed on torch's stream.
        for stream in self.current_streams(self.device_of(array)):
            self.check(self._driver.cuStreamSynchronize(stream))
        bits = array.view(unsigned)
        return bool(((bits & bits.dtype.type(mask)) > most).any())
