"""split_group over real ranks: each gets the group of its colour, or none."""

from __future__ import annotations

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks

pytestmark = pytest.mark.processes


def splits(me: Rank) -> list[int] | None:
    """Split three ranks into two groups and nothing; return the ranks of this one's."""
    dist.init_process_group("tcp", timeout=30)
    outer = dist.new_group([0, 1, 3]) if me.rank != 2 else None
    inner = None
    if outer is not None:
        inner = dist.split_group(outer, [[2, 0]])
    if inner is not None:
        x = np.full(3, me.rank + 1.0)
        dist.all_reduce(x, group=inner)
        assert (x == 1 + 4).all()
    everybody = np.ones(1)
    dist.all_reduce(everybody)
    assert everybody == 4
    dist.destroy_process_group()
    return None if inner is None else inner.ranks


def test_each_rank_gets_the_group_of_its_colour() -> None:
    assert run_ranks(4, splits, timeout=60) == [[0, 3], None, None, [0, 3]]
