"""Arrays of more than 2 GiB, the most that one call of the kernel reads or writes."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.gloo.library import gloo_options, installed, unavailable

pytestmark = [
    pytest.mark.processes,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        unavailable() is not None, reason="no gloo library for this Python"
    ),
    pytest.mark.skipif(
        psutil.virtual_memory().available < 14 << 30, reason="needs 14 GiB of memory"
    ),
]

SIZE = (2 << 30) + 4099
# Around what fits into 31 and 30 bits, and at many other places.
MARKS = np.array(
    [0, 1, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, SIZE - 1]
    + [part * (100 << 20) + 7 for part in range(20)]
)


def fill(x: np.ndarray, rank: int) -> None:
    x.fill(rank + 1)
    x[MARKS] = 10 * (rank + 1) + MARKS % 7


def check(x: np.ndarray, *ranks: int) -> None:
    """`x` is the sum of what `fill` made for `ranks`."""
    marked = sum(10 * (rank + 1) + MARKS % 7 for rank in ranks)
    assert np.array_equal(x[MARKS], marked)
    others = sum(rank + 1 for rank in ranks)
    # In pieces: what compares all at once fills 2 GiB of fresh memory.
    pieces = (x[at : at + (4 << 20)] for at in range(0, SIZE, 4 << 20))
    assert sum(
        np.count_nonzero(piece != others) for piece in pieces
    ) == np.count_nonzero(x[np.unique(MARKS)] != others)


def large(me: Rank, library: str) -> None:
    with gloo_options(library=library):
        dist.init_process_group("gloo", timeout=300)
        x = np.empty(SIZE, np.uint8)
        fill(x, me.rank)
        dist.all_reduce(x)
        check(x, 0, 1)
        fill(x, me.rank)
        dist.broadcast(x, 1)
        check(x, 1)
        fill(x, me.rank)
        dist.reduce(x, 0)
        check(x, *((0, 1) if me.rank == 0 else (1,)))
        fill(x, me.rank)
        if me.rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        check(x, 0)
        dist.destroy_process_group()


@pytest.mark.parametrize("library", list(installed()))
def test_arrays_beyond_2_gib(library: str) -> None:
    run_ranks(2, large, library, timeout=500)
