"""The GPU of a rank: which one the rank uses, and its name and memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from rankscope.backends import unavailable_reason
from rankscope.backends.devices.cuda_context import cuda_contexts, gpu_uuid
from rankscope.backends.devices.cuda_install import has_driver
from rankscope.backends.devices.gpu_memory import GpuMemory, GpuUse
from rankscope.backends.interface.registry import builtin_devices
from rankscope.backends.thread_start import start_thread

from ..errors import ClusterError
from ..wire.gpu_environment import DEVICES, SHARE_GPU, parse_devices

__all__ = ["NO_GPU", "Gpu", "GpuReadings", "choose_device", "load_cupy", "may_share"]

#: Values of `SHARE_GPU` that mean no.
_NO = ("", "0", "false", "no", "off")

#: `Gpu.summary` of a rank without a GPU.
NO_GPU: tuple[str, int | None] = ("", None)


def choose_device(env: Mapping[str, str], count: int) -> int | None:
    """Return the device, of `count`, for the rank that `env` describes."""
    wanted = _wanted(env)
    missing = [number for number in wanted if number >= count]
    if missing:
        raise ClusterError(
            f"--devices {','.join(map(str, wanted))}: there is no device "
            f"{missing[0]}, its host has {_devices_there(count)}"
        )
    if not count:
        return None
    devices = wanted or range(count)
    return devices[int(env["LOCAL_RANK"]) % len(devices)]


def may_share(env: Mapping[str, str]) -> bool:
    return env.get(SHARE_GPU, "").strip().lower() not in _NO


def _wanted(env: Mapping[str, str]) -> tuple[int, ...]:
    """Return the requested devices; the variable may also be set by a user."""
    text = env.get(DEVICES, "").strip()
    try:
        return parse_devices(text) if text else ()
    except ValueError as error:
        raise ClusterError(f"the variable {DEVICES}={text!r}: {error}") from None


def _devices_there(count: int) -> str:
    if count:
        return "device 0 alone" if count == 1 else f"devices 0 to {count - 1}"
    reasons = [
        unavailable_reason(name)
        for name, devices in builtin_devices().items()
        if "cuda" in devices
    ]
    return ": ".join(["no GPU that can be used", *filter(None, reasons)])


def load_cupy() -> Any | None:
    """Return cupy, if it is installed and there is a GPU; else ``None``."""
    # The import takes a second in each engine: only with a driver.
    if not has_driver() or find_spec("cupy") is None:
        return None
    import cupy

    try:
        return cupy if cupy.cuda.runtime.getDeviceCount() > 0 else None
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


class Gpu:
    """The GPU of this rank, the CUDA device `index`.

    ``use()`` makes it the calling thread's current device; ``pool()`` returns the bytes
    that the pool of the rank's array library holds on it. `uuid` is for where
    cuda-bindings does not know it.
    """

    def __init__(
        self,
        index: int,
        name: str,
        use: Callable[[], object],
        pool: Callable[[], int | None],
        uuid: str = "",
    ) -> None:
        self.index, self.name = index, name
        self.use = use
        #: Empty where it is not known.
        self.uuid = gpu_uuid(index) or uuid
        self._readings = GpuReadings(GpuMemory(index).read, pool)

    @classmethod
    def of_cupy(cls, cupy: Any, index: int) -> Gpu:
        name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        use = cupy.cuda.Device(index).use

        def pool() -> int | None:
            # To choose the device makes a context on it, of some 500 MB.
            if not cuda_contexts().is_active(index):
                return None
            use()
            return int(cupy.get_default_memory_pool().total_bytes())

        return cls(index, name, use, pool)

    @classmethod
    def of_torch(cls, torch: Any, index: int) -> Gpu:
        properties = torch.cuda.get_device_properties(index)
        # torch 2.5 and later report the UUID without cuda-bindings.
        uuid = str(getattr(properties, "uuid", ""))
        cuda = torch.cuda

        def pool() -> int | None:
            return int(cuda.memory_reserved(index)) if cuda.is_initialized() else None

        return cls(index, properties.name, lambda: cuda.set_device(index), pool, uuid)

    def summary(self) -> tuple[str, int | None]:
        """Return ``gpu`` and ``gpu_memory``, of one reading; never waits."""
        text = f"GPU {self.index} · {self.name}"
        use = self._readings.latest()
        if use is None:
            return text, None
        if use.used is not None and use.total is not None:
            used, total = (size / 2**30 for size in (use.used, use.total))
            text += f" · {used:.1f} of {total:.1f} GiB"
        return text, use.own


_log = logging.getLogger(__name__)

#: Seconds between two readings at least.
PERIOD = 1.0
#: A reading is followed by so many times its processor time without one: a millisecond
#: a second at most.
REST_FACTOR = 1000.0
#: Seconds for which a reading is shown while the next one does not come.
KEPT = 10.0


class GpuReadings:
    """Reads the memory of a GPU, a reading at a time, beside the thread that publishes.

    NVML and the pools of cupy and torch may keep a reader waiting: behind a call of
    CUDA that holds a lock, or behind a GPU that does not answer.

    ``memory()`` returns NVML's account of the GPU, ``pool()`` the bytes that the
    process's own pool of arrays holds, ``None`` where that is not known: for a process
    that NVML does not list, as in a container with process ids of its own.
    """

    def __init__(
        self, memory: Callable[[], GpuUse | None], pool: Callable[[], int | None]
    ) -> None:
        self._memory, self._pool = memory, pool
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._last: GpuUse | None = None
        self._read_at = self._due = -KEPT

    def latest(self) -> GpuUse | None:
        """Return the last reading; begin another where that is due. Never waits."""
        with self._lock:
            now = time.monotonic()
            if self._thread is None and now >= self._due:
                self._thread = start_thread("gpu-memory", self._read)
            return self._last if now - self._read_at < KEPT else None

    def _read(self) -> None:
        began = time.thread_time()
        found: GpuUse | None = None
        try:
            found = self._memory()
            if found is None or found.own is None:
                own = self._pool()
                found = GpuUse(own=own) if found is None else found._replace(own=own)
        except (ImportError, RuntimeError) as error:
            # RuntimeError is the base of the errors of cupy and torch.
            _log.info("the memory of the rank's arrays is not known: %s", error)
        finally:
            rest = REST_FACTOR * (time.thread_time() - began)
            with self._lock:
                self._last, self._read_at = found, time.monotonic()
                self._due = self._read_at + max(PERIOD, rest)
                self._thread = None
