"""Sixty-four ranks on one host: collectives, an abort, memory, descriptors.

``make soak PYTEST_ARGS="-k sixty_four -s"`` prints what docs/backends.md says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from tests.backends.backends import MESSAGING_BACKENDS

pytestmark = [pytest.mark.processes, pytest.mark.soak]

RANKS = 64


def own_mib() -> float:
    """Return the memory of this process alone."""
    return psutil.Process().memory_full_info().uss / (1 << 20)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def timed(op: Callable[[], object]) -> float:
    began = time.monotonic()
    op()
    return time.monotonic() - began


def check_all_reduce(array: np.ndarray) -> None:
    array[:] = 1
    dist.all_reduce(array)
    assert (array == RANKS).all()


def crowd(me: Rank, backend: str) -> dict[str, float]:
    found = {"MiB before": own_mib(), "descriptors before": descriptors()}
    array = np.empty(1 << 18, np.float32)
    dist.init_process_group(backend, timeout=240)
    found["s first barrier"] = timed(dist.barrier)
    found["s barrier"] = timed(dist.barrier)
    check_all_reduce(array)
    found["s all_reduce of 1 MiB"] = timed(lambda: check_all_reduce(array))
    found["MiB connected"] = own_mib()
    parts = [np.zeros(3) for _ in range(RANKS)]
    dist.all_to_all(parts, [np.full(3, float(me.rank)) for _ in range(RANKS)])
    assert [part[0] for part in parts] == [*range(RANKS)]
    found["MiB all pairs"] = own_mib()
    found["descriptors connected"] = descriptors()
    other = dist.new_group()
    dist.barrier(other)
    found["MiB second group"] = own_mib()
    found["descriptors second group"] = descriptors()
    dist.barrier()

    group = dist.group.WORLD
    assert group is not None
    # Rank 7 does not enter.
    work = None if me.rank == 7 else dist.all_reduce(array, async_op=True)
    me.meet("in flight")
    began = time.monotonic()
    if me.rank == 7:
        group.abort("a test")
    else:
        assert work is not None
        with pytest.raises(dist.DistAbortedError, match="a test"):
            work.wait()
    found["s abort"] = time.monotonic() - began
    me.meet("aborted")
    dist.rebuild_process_group(group)
    found["s first op after the rebuild"] = timed(lambda: check_all_reduce(array))
    dist.destroy_process_group()
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", MESSAGING_BACKENDS)
def test_sixty_four_ranks(
    backend: str, record_property: Callable[[str, object], None]
) -> None:
    ranks = run_ranks(RANKS, crowd, backend, timeout=500)
    print()
    for name in ranks[0]:
        values = sorted(rank[name] for rank in ranks)
        record_property(name, values[-1])
        print(f"{name:30} median {values[RANKS // 2]:7.2f}   most {values[-1]:7.2f}")
    # A worker and its event loop; shared memory is named by no descriptor. Or a socket
    # to each other rank.
    growth = [
        rank["descriptors second group"] - rank["descriptors connected"]
        for rank in ranks
    ]
    assert max(growth) < (RANKS + 5 if backend == "tcp" else 20)
    assert max(rank["MiB all pairs"] - rank["MiB before"] for rank in ranks) < 32
