"""Contexts for tests whose ranks share one GPU."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.process_group import ProcessGroup
from rankscope.engines.wire.gpu_environment import Gpus

__all__ = ["SLACK", "aborted_meanwhile", "used", "world"]

#: Bytes by which the used memory of the GPU may grow after everything was freed.
SLACK = 16 << 20


def used(cupy: Any) -> int:
    """Return the bytes of the current GPU's memory that all processes use."""
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


@contextlib.contextmanager
def world(me: Rank, timeout: float = 60, backend: str = "cuda:nccl") -> Iterator[Any]:
    """Create the default group of ranks that share the first GPU; yield cupy.

    `timeout` is the timeout of the group, in seconds.
    """
    os.environ.update(Gpus(share=True).environment(me.rank))
    import cupy

    dist.init_process_group(backend, timeout=timeout)
    try:
        yield cupy
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def aborted_meanwhile(group: ProcessGroup, reason: str) -> Iterator[list[float]]:
    """Abort `group` on another thread, 1 s after the block has an op in flight.

    Yields a list to which the thread appends the time at which the abort begins, in
    seconds of ``time.monotonic()``.
    """
    began: list[float] = []

    def abort() -> None:
        until(lambda: bool(group.status.in_flight), 20)
        # The main thread should block in its wait before the abort, and no state shows
        # whether the main thread does: one second is enough.
        time.sleep(1)
        began.append(time.monotonic())
        dist.abort_process_group(group, reason)

    thread = threading.Thread(target=abort, name="abort")
    thread.start()
    try:
        yield began
    finally:
        thread.join()
