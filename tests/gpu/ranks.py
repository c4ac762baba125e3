"""Two ranks on one GPU, and what they share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import rankscope as dist
from rankscope.engines.gpus import Gpus
from tests.ranks import Rank

__all__ = ["world"]


@contextlib.contextmanager
def world(me: Rank, timeout: float = 60, backend: str = "cuda:nccl") -> Iterator[Any]:
    """The default group of ranks that share the first GPU; yields cupy."""
    os.environ.update(Gpus(share=True).environment(me.rank))
    import cupy

    dist.init_process_group(backend, timeout=timeout)
    try:
        yield cupy
    finally:
        dist.destroy_process_group()
