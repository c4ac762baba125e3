"""Lane: what is given to NCCL on one device of this rank, by all groups.

NCCL wants the communicators of a device to be used by one thread at a time, and in
one order on all ranks: else kernels that wait for each other can take each other's
place on the device. So all ops of a device stand in one queue, in order of issue,
and whoever makes it advance holds its lock.
"""

from __future__ import annotations

import collections
import threading
import time
import weakref
from typing import TYPE_CHECKING

from .nccl_progress import progress
from .nccl_seam import Seam
from .uninterrupted import Uninterrupted

if TYPE_CHECKING:
    from .nccl_queue import Launch, NCCLQueue, NCCLWork

__all__ = ["Lane", "lane_of"]

#: Works that are over, and how long each was on the device, in ms, if that is known.
_Over = list[tuple["list[NCCLWork]", "float | None"]]


class Lane:
    """The ops of one device that NCCL does not have yet, and those it is at.

    `lock` is held around every call of NCCL and CUDA that is made for them. An
    abort goes on without it where its holder is stuck in such a call.
    """

    def __init__(self, seam: Seam, device: int) -> None:
        self.seam, self.device = seam, device
        self.lock = threading.Lock()
        self._waiting: collections.deque[Launch] = collections.deque()
        # Held for a moment: by `put`, which must not wait for `lock`.
        self._gate = threading.Lock()
        self._flying: set[NCCLQueue] = set()
        #: When it was last seen to, ``time.monotonic``.
        self.looked = 0.0

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._waiting or self._flying)

    def waiting(self, queue: NCCLQueue) -> list[Launch]:
        """What of `queue` NCCL does not have, or has not launched."""
        with self._gate:
            return [one for one in self._waiting if one.queue is queue]

    def _queues(self) -> set[NCCLQueue]:
        """Those with something under way."""
        with self._gate:
            return {*self._flying, *(one.queue for one in self._waiting)}

    def put(self, launch: Launch) -> bool:
        """Take `launch` as the last; ``False`` if its queue is retired."""
        with self._gate:
            if launch.queue.retired:
                return False
            self._waiting.append(launch)
            return True

    def advance(self, *, issuing: bool = False) -> bool:
        """Do what can be done now; say whether anything moved. Never waits.

        While an op is `issuing`, no callbacks of Works are run: they are anybody's
        code, and may issue ops, too. Nor are they where interrupts are put off.
        """
        over: _Over = []
        broken: list[tuple[NCCLQueue, Exception]] = []
        moved = False
        with Uninterrupted() as on_main:
            if not self.lock.acquire(blocking=False):
                return False
            try:
                with self.seam.cuda.device(self.device):
                    moved = self._give(broken)
                    self._reap(over, broken)
            except Exception as error:  # noqa: BLE001 - every Work has to hear of it
                # The device itself cannot be used.
                broken += [(queue, error) for queue in self._queues()]
            finally:
                self.looked = time.monotonic()
                self.lock.release()
            for queue, why in broken:
                queue.break_(why)
            for works, elapsed_ms in over:
                for work in works:
                    work.end(elapsed_ms, callbacks_later=issuing or on_main)
        return moved or bool(over)

    def _give(self, broken: list[tuple[NCCLQueue, Exception]]) -> bool:
        """Give to NCCL what can be given; the lock is held."""
        moved = False
        while self._waiting:
            launch = self._waiting[0]
            queue, given = launch.queue, launch.given
            try:
                launched = not queue.over and queue.give(launch)
            except Exception as error:  # noqa: BLE001 - it is told by the group
                broken.append((queue, error))
                queue.broken = True
                launched = False
            moved = moved or launched or launch.given != given
            if not launched and not queue.over:
                break
            if launched:
                # First: it is busy all the time.
                self._flying.add(queue)
            with self._gate:
                self._waiting.popleft()
            if not launched:
                # Its end frees what it holds, unless that was before.
                queue.drop(launch)
        return moved

    def _reap(self, over: _Over, broken: list[tuple[NCCLQueue, Exception]]) -> None:
        """Find what the device has done; the lock is held."""
        for queue in list(self._flying):
            if not queue.over:
                try:
                    over += queue.reap()
                except Exception as error:  # noqa: BLE001 - it is told by the group
                    broken.append((queue, error))
                    queue.broken = True
            if queue.over or not queue.in_flight:
                self._flying.discard(queue)

    def sweep(self, queue: NCCLQueue) -> list[Launch]:
        """Take out what is left of `queue`, which is over; the lock is held."""
        with self._gate:
            left = [one for one in self._waiting if one.queue is queue]
            kept = [one for one in self._waiting if one.queue is not queue]
            self._waiting = collections.deque(kept)
        self._flying.discard(queue)
        return left

    def watch(self) -> None:
        """Have the thread of `nccl_progress` advance it for as long as it is busy."""
        if self.busy:
            progress.add(self, soon=bool(self._waiting))


_lanes: weakref.WeakValueDictionary[tuple[int, int], Lane] = (
    weakref.WeakValueDictionary()
)
_lock = threading.Lock()


def lane_of(seam: Seam, device: int) -> Lane:
    """The lane of `device`, one for all groups of this process."""
    with _lock:
        lane = _lanes.get((id(seam), device))
        if lane is None or lane.seam is not seam:
            lane = _lanes[id(seam), device] = Lane(seam, device)
        return lane
