"""Fixtures of the c10d layer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rankscope as dist
from rankscope.backends import nccl_seam
from rankscope.backends.late_errors import take_late_error
from rankscope.backends.recorder import recorder
from rankscope.backends.watchdog import watchdog
from rankscope.backends.world import world
from tests.backends.gpu_ranks import Ranks
from tests.backends.gpu_simulation import Simulation
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


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    """A simulated GPU for each rank of this process, and NCCL between them."""
    made = Simulation()
    nccl_seam.use(lambda: made.seam)
    yield made
    made.close()
    nccl_seam.use(None)
    watchdog.stop()
    # Pytest is no script that ends on garbage.
    take_late_error()


@pytest.fixture
def ranks(simulation: Simulation, tmp_path: Path) -> Iterator[Ranks]:
    """Ranks on it, to be started."""
    made = Ranks(simulation, tmp_path)
    yield made
    made.close()
