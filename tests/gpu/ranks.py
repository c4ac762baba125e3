"""Two ranks on one GPU, and what they share."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import rankscope as dist
from rankscope.backends.process_group import ProcessGroup
from rankscope.engines.gpus import Gpus
from tests.ranks import Rank
from tests.waiting import until

__all__ = ["SLACK", "aborted_meanwhile", "used", "world"]

#: Bytes by which the GPU's memory in use may grow, with everything given back.
SLACK = 16 << 20


def used(cupy: Any) -> int:
    """Bytes of the current GPU's memory that are in use, whoever uses them."""
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


@contextlib.contextmanager
def world(me: Rank, timeout: float = 60, backend: str = "cuda:nccl") -> Iterator[Any]:
    """The default group of ranks that share the first GPU; yields cupy."""
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
    """Another thread aborts `group`, a second after the block has an op in flight.

    Yields a list that gets the time (``time.monotonic()``) at which it begins to.
    """
    began: list[float] = []

    def abort() -> None:
        until(lambda: bool(group.status.in_flight), 20)
        # By then the main thread sits where it waits, which nothing tells.
        time.sleep(1)
        began.append(time.monotonic())
        dist.abort_process_group(group, reason)

    thread = threading.Thread(target=abort, name="abort")
    thread.start()
    try:
        yield began
    finally:
        thread.join()
