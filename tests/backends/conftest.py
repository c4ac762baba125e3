"""Fixtures of the c10d layer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rankscope as dist
from rankscope.backends.recorder import recorder
from rankscope.backends.world import world
from tests.backends.manual import Manual


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """The default group of rank 0 of 4, over `Manual` for cpu and cuda."""
    dist.Backend.register_backend("manual", Manual, devices=("cpu", "cuda"))
    store = dist.FileStore(str(tmp_path / "store"), 4)
    dist.init_process_group("cpu:manual,cuda:manual", store=store, rank=0, world_size=4)
    recorder.clear()
    yield world.get_group()
    world.destroy()
    store.close()
    del dist.Backend.registry["manual"]
    Manual.made.clear()
