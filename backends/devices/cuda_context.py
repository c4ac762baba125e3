"""The current CUDA context of a thread, set and restored without the CUDA runtime.

The runtime has a current device for every thread, device 0 for a thread that never
chose one, and from CUDA 12 on ``cudaSetDevice`` creates the primary context of the
device. Whoever restores the device of such a thread with the runtime therefore creates
a context on device 0, some 500 MB, in every process. The driver's current context is
null on such a thread, and null is restored without a context.
"""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

from ..errors import LibraryFailure

__all__ = ["CudaContexts", "cuda_contexts", "gpu_uuid"]


class CudaContexts:
    """The primary contexts of the devices, as the CUDA driver of `driver` has them.

    `driver` is ``cuda.bindings.driver``. The runtime, cupy and torch use the primary
    context of a device, too, and take the current context for the current device.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._get_current = driver.cuCtxGetCurrent
        self._success = driver.CUresult.CUDA_SUCCESS
        self._relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        # What was set on the calling thread.
        self._thread = threading.local()
        self._primary: dict[int, tuple[int, Any]] = {}
        self.check(driver.cuInit(0))

    def current_device(self) -> int | None:
        (context,) = self.check(self._get_current())
        if not int(context):
            return None
        (device,) = self.check(self._driver.cuCtxGetDevice())
        return int(device)

    def device(self, index: int) -> OnDevice:
        return OnDevice(self, index)

    def use(self, index: int) -> None:
        """Make `index` the current device of the calling thread, with no way back.

        For threads of the backend, whose device the user's code does not see. Their
        calls do not break the capture of a CUDA graph on another thread: by default a
        query of an event, for instance, invalidates every capture of the process.
        """
        if not getattr(self._thread, "relaxed", False):
            self.check(self._driver.cuThreadExchangeStreamCaptureMode(self._relaxed))
            self._thread.relaxed = True
        self.enter(index)

    def is_active(self, index: int) -> bool:
        """Return whether this process has a primary context on device `index`."""
        (device,) = self.check(self._driver.cuDeviceGet(index))
        _, active = self.check(self._driver.cuDevicePrimaryCtxGetState(device))
        return bool(active)

    def device_count(self) -> int:
        (count,) = self.check(self._driver.cuDeviceGetCount())
        return int(count)

    def uuid(self, index: int) -> str:
        """Return the UUID of device `index`, that of its MIG instance if any."""
        # CUDA 13 gave the name of the first version, which knows no MIG, to the second.
        get_uuid = getattr(
            self._driver, "cuDeviceGetUuid_v2", self._driver.cuDeviceGetUuid
        )
        (device,) = self.check(self._driver.cuDeviceGet(index))
        (found,) = self.check(get_uuid(device))
        return str(UUID(bytes=bytes(found.bytes)))

    def enter(self, index: int) -> int | None:
        """Make the context of device `index` current; return what `restore` takes."""
        # On the path of each op: as few calls as possible.
        result, current = self._get_current()
        if result != self._success:
            self.check((result,))
        before = int(current)
        primary = self._primary.get(index) or self._retain(index)
        if before == primary[0]:
            return None
        self.restore(primary[1])
        return before

    def restore(self, context: Any) -> None:
        """Make `context` the calling thread's current context; 0 stands for none."""
        self.check(self._driver.cuCtxSetCurrent(context))

    def _retain(self, index: int) -> tuple[int, Any]:
        """Return the primary context of `index`, which this process keeps."""
        (device,) = self.check(self._driver.cuDeviceGet(index))
        (context,) = self.check(self._driver.cuDevicePrimaryCtxRetain(device))
        primary = self._primary[index] = (int(context), context)
        return primary

    def check(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values of `answer` after its CUresult, if that is a success."""
        result, *values = answer
        if result != self._success:
            _, text = self._driver.cuGetErrorString(result)
            said = text.decode() if isinstance(text, bytes) else str(result)
            raise LibraryFailure(f"CUDA reports: {said} ({result.name})")
        return tuple(values)


class OnDevice:
    """A ``with`` block in which the calling thread has another current device.

    A class, because a generator would cost twice as much in each op.
    """

    __slots__ = ("_before", "_contexts", "_index")

    def __init__(self, contexts: CudaContexts, index: int) -> None:
        self._contexts, self._index = contexts, index

    def __enter__(self) -> None:
        self._before = self._contexts.enter(self._index)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            self._contexts.restore(self._before)


_contexts: CudaContexts | None = None


def cuda_contexts() -> CudaContexts:
    """Return the contexts of this process."""
    global _contexts
    if _contexts is None:
        from cuda.bindings import driver

        _contexts = CudaContexts(driver)
    return _contexts


def gpu_uuid(index: int) -> str:
    """Return the UUID of the CUDA device `index`; empty where it is not known."""
    try:
        return cuda_contexts().uuid(index)
    except (ImportError, RuntimeError):
        # There are no bindings of the driver, or there is no driver.
        return ""
