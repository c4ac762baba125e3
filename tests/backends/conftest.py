"""Fixtures of the c10d layer's tests."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankscope as dist
from rankscope.backends.groups.watchdog import watchdog
from rankscope.backends.groups.world import world
from rankscope.backends.interface.registry import builtin_devices
from rankscope.backends.work.async_errors import take_async_error
from rankscope.backends.work.flight_recorder import recorder
from tests.backends.gpu_ranks import Ranks
from tests.backends.gpu_simulation import Simulation, use_gpu_api
from tests.backends.manual import Manual


@pytest.fixture(scope="module", autouse=True)
def _registrations_of_the_module_end_with_it() -> Iterator[None]:
    """Modules of one worker share the registry; the built-in backends stay in it."""
    before = {*dist.Backend.registry, *builtin_devices()}
    yield
    for name in {*dist.Backend.registry} - before:
        del dist.Backend.registry[name]


# The number from which on select() takes no descriptor.
_FD_SETSIZE = 1024


@pytest.fixture
def high_descriptors() -> Iterator[None]:
    """Have what the test opens numbered above the descriptors that select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _FD_SETSIZE
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} descriptors: ulimit -Hn is {hard}")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while fillers[-1] < _FD_SETSIZE:
            fillers.append(os.dup(fillers[0]))
        yield
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """The default group of rank 0 of 4, over `Manual` for cpu and cuda."""
    dist.Backend.register_backend("manual", Manual, devices=("cpu", "cuda"))
    store = dist.FileStore(str(tmp_path / "store"), 4)
    dist.init_process_group(
        "cpu:manual,cuda:manual",
        store=store,
        rank=0,
        world_size=4,
        wait_for_workers=False,
    )
    recorder.clear()
    yield world.get_group()
    world.abort(None, "the test is over")
    world.destroy()
    store.close()
    del dist.Backend.registry["manual"]
    Manual.made.clear()


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    """A simulated GPU for each rank of this process, and NCCL between them."""
    made = Simulation()
    use_gpu_api(lambda: made.api)
    yield made
    made.close()
    use_gpu_api(None)
    watchdog.stop()
    # Pytest is no script that ends on garbage.
    take_async_error()


@pytest.fixture
def ranks(simulation: Simulation, tmp_path: Path) -> Iterator[Ranks]:
    """Ranks on it, to be started."""
    made = Ranks(simulation, tmp_path)
    yield made
    made.close()
