"""Fixtures of the tests that need PyTorch: ``make test-torch`` runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.magics.conftest import ipython
from tests.with_torch.ranks import Ranks

__all__ = ["ipython"]

# Before torch is imported, here and in each process that a test starts: a pool of
# threads for each would take turns on few cores.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="module")
def two(_module_leaves_nothing: None) -> Iterator[Ranks]:
    """Two processes, shared by the tests of a module."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def ranks(two: Ranks) -> Iterator[Ranks]:
    """Two ranks of a default group of torch, which a test may add groups to."""
    two.init()
    two.run("x = torch.ones(4, 3); other = 1 - rank")
    yield two
    two.run("dist.barrier(); dist.destroy_process_group()")
