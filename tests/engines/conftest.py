"""A cluster for each module that wants one: starting takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope.engines import Cluster


@pytest.fixture(scope="module")
def cluster(_module_leaves_nothing: None) -> Iterator[Cluster]:
    """Four ranks, shared by the tests of a module, which leave them usable."""
    with Cluster.start(4) as started:
        yield started
