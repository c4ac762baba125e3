"""Per-device launch queue: ops not yet handed to NCCL, and streams with ops in flight.

NCCL requires that the communicators of a device are used by one thread at a time,
and in one order on all ranks: otherwise kernels that wait for each other may keep
each other off the device. So the ops of all groups on a device stand in one queue,
in order of issue, and whoever advances the queue holds its lock.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from ..work.sigint import defer_sigint
from .interface import GpuApi
from .progress import progress
from .work import Launch, NCCLWork

__all__ = ["DeviceQueue", "queue_of_device"]

#: Works that have completed, their time on the device in ms, and that between the end
#: of the op before and their start, if these are known.
Completed = tuple[Sequence[NCCLWork], "float | None", "float | None"]


_NO_SWITCH = contextlib.nullcontext()


class Stream(Protocol):
    """What the queue uses of a group's stream, an `NCCLStream`.

    All but the last are called with the queue's lock held.
    """

    @property
    def accepts(self) -> bool: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def in_flight(self) -> collections.deque[Launch]: ...
    def try_launch(self, launch: Launch) -> bool: ...
    def collect_completed(self) -> list[Completed]: ...
    def discard(self, launch: Launch) -> None: ...
    def mark_broken(self, error: Exception) -> None: ...
    def report_failure(self) -> None: ...


class DeviceQueue:
    """The launch queue of one device.

    `lock` is held around every call of NCCL and CUDA that is made for its ops. An
    abort proceeds without it where the holder is stuck in such a call.
    """

    def __init__(self, api: GpuApi, device: int) -> None:
        self.api, self.device = api, device
        self.lock = threading.Lock()
        self._pending: collections.deque[tuple[Stream, Launch]] = collections.deque()
        # Never held during a call: `put` must not wait for `lock`.
        self._pending_lock = threading.Lock()
        self._flying: set[Stream] = set()
        #: The last time it was advanced, ``time.monotonic``.
        self.last_advance = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._pending or self._flying)

    def pending(self, stream: Stream) -> list[Launch]:
        """Return what of `stream` was not launched yet."""
        with self._pending_lock:
            return [launch for one, launch in self._pending if one is stream]

    def put(self, stream: Stream, launch: Launch) -> bool:
        """Append `launch`; return ``False`` if `stream` does not accept ops."""
        # Within the lock, so that `remove_all` of a closed stream is final.
        with self._pending_lock:
            if not stream.accepts:
                return False
            self._pending.append((stream, launch))
            return True

    def remove_all(self, stream: Stream) -> list[Launch]:
        """Remove what is left of `stream`, and return it; the lock is held."""
        with self._pending_lock:
            left = [launch for one, launch in self._pending if one is stream]
            others = [entry for entry in self._pending if entry[0] is not stream]
            self._pending = collections.deque(others)
        self._flying.discard(stream)
        return left

    def watch(self) -> None:
        """Have the progress thread advance the queue for as long as it is busy."""
        if self.busy:
            progress.add(self, soon=bool(self._pending))

    def advance(self) -> bool:
        """Launch and collect what can be; return whether anything moved.

        Never waits. Callbacks of Works are anybody's code and may issue ops: where
        interrupts are deferred, they run on the progress thread.
        """
        with defer_sigint() as on_main:
            return self._advance(on_main, on_device=False)

    def advance_in_submit(self) -> bool:
        """As `advance`; the caller has deferred interrupts and set the device."""
        return self._advance(True, on_device=True)

    def _advance(self, callbacks_later: bool, *, on_device: bool) -> bool:
        completed: list[Completed] = []
        broken: list[Stream] = []
        moved = False
        if not self.lock.acquire(blocking=False):
            return False
        try:
            with _NO_SWITCH if on_device else self.api.cuda.device(self.device):
                moved = self._launch_pending(broken)
                self._collect(completed, broken)
        except Exception as error:  # noqa: BLE001 - it ends every op of the device
            # The device itself cannot be used.
            for stream in self._streams():
                stream.mark_broken(error)
                broken.append(stream)
        finally:
            self.last_advance = time.monotonic()
            self.lock.release()
        for stream in broken:
            stream.report_failure()
        for works, elapsed_ms, since_ms in completed:
            for work in works:
                work.end(elapsed_ms, since_ms, callbacks_later=callbacks_later)
        return moved or bool(completed)

    def _streams(self) -> set[Stream]:
        with self._pending_lock:
            return {*self._flying, *(stream for stream, _ in self._pending)}

    def _launch_pending(self, broken: list[Stream]) -> bool:
        moved = False
        while self._pending:
            stream, launch = self._pending[0]
            was_issued, launched = launch.issued, False
            try:
                launched = stream.healthy and stream.try_launch(launch)
            except Exception as error:  # noqa: BLE001 - the group reports it
                stream.mark_broken(error)
                broken.append(stream)
            moved = moved or launched or launch.issued != was_issued
            if not launched and stream.healthy:
                break
            if launched:
                # Before it leaves `_pending`, so that `busy` stays true.
                self._flying.add(stream)
            with self._pending_lock:
                self._pending.popleft()
            if not launched:
                stream.discard(launch)
        return moved

    def _collect(self, completed: list[Completed], broken: list[Stream]) -> None:
        for stream in list(self._flying):
            if stream.healthy:
                try:
                    completed += stream.collect_completed()
                except Exception as error:  # noqa: BLE001 - the group reports it
                    stream.mark_broken(error)
                    broken.append(stream)
            if not stream.healthy or not stream.in_flight:
                self._flying.discard(stream)


_queues: weakref.WeakValueDictionary[tuple[int, int], DeviceQueue] = (
    weakref.WeakValueDictionary()
)
_lock = threading.Lock()


def queue_of_device(api: GpuApi, device: int) -> DeviceQueue:
    """Return the queue of `device`, one for all groups of this process."""
    with _lock:
        queue = _queues.get((id(api), device))
        if queue is None or queue.api is not api:
            queue = _queues[id(api), device] = DeviceQueue(api, device)
        return queue
