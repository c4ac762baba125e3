"""The memory of the rank's GPU for its status, read beside the thread that publishes.

NVML and the pools of cupy and torch may keep a reader waiting: behind a call of CUDA
that holds a lock, or behind a GPU that does not answer. The status goes on meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from rankscope.backends.devices.gpu_memory import GpuUse

__all__ = ["GpuReadings"]

_log = logging.getLogger(__name__)

#: Seconds between two readings at least.
PERIOD = 1.0
#: A reading is followed by so many times its processor time without one: a millisecond
#: a second at most.
REST_FACTOR = 1000.0
#: Seconds for which a reading is shown while the next one does not come.
KEPT = 10.0


class Memory(Protocol):
    """The calls of `GpuMemory` that the readings need."""

    def read(self) -> GpuUse | None: ...


class GpuReadings:
    """Reads the memory of a GPU, a reading at a time.

    `memory` is NVML's account of the GPU. ``pool()`` returns the bytes that the
    process's own pool of arrays holds, ``None`` where that is not known: for a process
    that NVML does not list, as in a container with process ids of its own.
    """

    def __init__(self, memory: Memory, pool: Callable[[], int | None]) -> None:
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
                self._thread = threading.Thread(
                    target=self._read, name="rankscope-gpu-memory", daemon=True
                )
                self._thread.start()
            return self._last if now - self._read_at < KEPT else None

    def _read(self) -> None:
        began = time.thread_time()
        found: GpuUse | None = None
        try:
            found = self._memory.read()
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
