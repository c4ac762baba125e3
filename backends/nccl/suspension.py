"""Suspension: the communicators of a group free their device memory while it is idle.

ncclCommSuspend and ncclCommResume wait for all ranks, and only an abort ends that
wait. So the ranks first meet in the store: a rank that does not come is then known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import DistTimeoutError
from ..rank_sets import name_ranks
from ..stores.base import Store
from .communicator import MUTEX_WAIT, NCCLComm
from .interface import MEMORY_STATS, GpuApi, Handle
from .split import meet
from .stream import NCCLStream
from .stream_state import StreamState

__all__ = ["Suspension"]

# Seconds between two polls.
_NAP = 1e-3


class Suspension:
    """Suspends and resumes the communicators of one group on this rank."""

    def __init__(self, api: GpuApi, store: Store, rank: int, size: int) -> None:
        self._api, self._store = api, store
        self._rank, self._size = rank, size
        # How many meetings there were: no two use the same keys.
        self._meetings = 0

    def suspend(self, streams: Sequence[NCCLStream], timeout: float) -> None:
        """Free the device memory of `streams`, after their ops in flight have ended."""
        deadline = time.monotonic() + timeout
        for stream in streams:
            _until(
                stream.suspend, deadline, f"{stream.comm.name} still has ops in flight"
            )
        self._change("suspend", streams, self._api.nccl.suspend, deadline)

    def resume(self, streams: Sequence[NCCLStream], timeout: float) -> None:
        """Allocate what `suspend` freed; `streams` accept ops again."""
        suspended = [one for one in streams if one.state is StreamState.SUSPENDED]
        deadline = time.monotonic() + timeout
        self._change("resume", suspended, self._api.nccl.resume, deadline)
        for stream in suspended:
            stream.resume()

    def memory_stats(self, streams: Sequence[NCCLStream]) -> dict[str, int]:
        """Return the sums of NCCL's memory statistics; see `ProcessGroup`."""
        sums = dict.fromkeys(MEMORY_STATS, 0)
        for stream in streams:
            comm = stream.comm
            with self._api.cuda.device(comm.device), comm.mutex:
                stats = self._api.nccl.memory_stats(comm.handle) if comm.poll() else {}
            for name, value in stats.items():
                sums[name] += value
        return sums

    def _change(
        self,
        name: str,
        streams: Sequence[NCCLStream],
        call: Callable[[Handle], None],
        deadline: float,
    ) -> None:
        """Make `call` on each communicator, and wait for its end, with all ranks."""
        self._meet(name, deadline)
        for stream in streams:
            comm = stream.comm
            late = f"{name}() of {comm.name} has not ended in time"
            with self._api.cuda.device(comm.device):
                _until(partial(_when_ready, comm, call), deadline, late)
                _until(partial(_when_ready, comm), deadline, late)

    def _meet(self, name: str, deadline: float) -> None:
        """Return when every rank has come; name those that have not in an error."""
        self._meetings += 1
        key = f"suspension/{self._meetings}"
        self._store.set(f"{key}/{self._rank}", b"1")
        try:
            meet(self._store, key, self._size, deadline)
        except TimeoutError as error:
            came = [self._store.check([f"{key}/{r}"]) for r in range(self._size)]
            missing = [rank for rank, here in enumerate(came) if not here]
            raise DistTimeoutError(
                f"{name_ranks(missing)} of the group did not call {name}() in time",
                culprits=missing,
            ) from error


def _when_ready(
    comm: NCCLComm, call: Callable[[Handle], None] = lambda comm: None
) -> bool:
    """Make `call` if the last call on `comm` is over; return whether that is so."""
    # Never held while NCCL waits for other ranks: ops of other groups need the mutex.
    with comm.locked(MUTEX_WAIT) as held:
        if not held or not comm.poll():
            return False
        call(comm.handle)
        return True


def _until(step: Callable[[], bool], deadline: float, late: str) -> None:
    """Return once ``step()`` is true; raise `DistTimeoutError` after `deadline`."""
    while not step():
        if time.monotonic() > deadline:
            raise DistTimeoutError(late)
        time.sleep(_NAP)
