"""Communicators that are begun when a group is made: with a ``device_id``.

Over a simulated GPU, as in `test_nccl`. This process is rank 0 of its world; where the
world has two ranks, rank 1 never comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.nccl.communicator import CLOSE_WAIT
from rankscope.backends.nccl.progress import progress
from tests.backends.gpu_simulation import Simulation

DEVICE = 3

#: Makes the group.
Make = Callable[[], dist.ProcessGroup]
#: Makes the world: of so many ranks, with the ``device_id``.
Begin = Callable[[int, "int | None"], None]


@pytest.fixture
def begin(simulation: Simulation, tmp_path: Path) -> Iterator[Begin]:
    stores: list[dist.Store] = []

    def begin(size: int, device_id: int | None) -> None:
        stores.append(dist.FileStore(str(tmp_path / "store"), size))
        dist.init_process_group(
            "cuda:nccl",
            store=stores[0],
            rank=0,
            world_size=size,
            device_id=device_id,
            timeout=30,
            wait_for_workers=False,
        )

    yield begin
    dist.destroy_process_group()
    for store in stores:
        store.close()
    until(lambda: not progress.running)


def by_new_group() -> dist.ProcessGroup:
    made = dist.new_group(group_desc="late")
    assert isinstance(made, dist.ProcessGroup)
    return made


def by_split_group() -> dist.ProcessGroup:
    everybody = range(dist.get_world_size())
    made = dist.split_group(split_ranks=[everybody], group_desc="late")
    assert made is not None
    return made


@pytest.fixture(params=[by_new_group, by_split_group])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def begun(simulation: Simulation) -> int:
    """Return how many communicators were begun."""
    return simulation.calls.count(("init", 0)) + simulation.calls.count(("split", 0))


def devices(group: dist.ProcessGroup) -> str:
    told: str = group.summary().devices["cuda"]
    return told


def test_a_new_group_is_connected_before_its_first_op(
    simulation: Simulation, begin: Begin, make: Make
) -> None:
    begin(1, DEVICE)
    until(lambda: begun(simulation) == 1)
    group = make()
    until(lambda: begun(simulation) == 2)
    assert devices(group).startswith(f"nccl (device {DEVICE}: ")
    x = simulation.array([2.0], DEVICE)
    dist.all_reduce(x, group=group)
    assert begun(simulation) == 2
    with pytest.raises(ValueError, match=f"its communicator is on device {DEVICE}"):
        dist.all_reduce(simulation.array([2.0], 0), group=make())


def test_without_a_device_id_it_is_connected_by_its_first_op(
    simulation: Simulation, begin: Begin, make: Make
) -> None:
    begin(1, None)
    dist.all_reduce(simulation.array([1.0], DEVICE))
    group = make()
    assert group.backends() == []
    assert begun(simulation) == 1
    dist.all_reduce(simulation.array([2.0], 5), group=group)
    assert devices(group) == "nccl (device 5: running)"


def test_another_backend_is_not_begun_with_it(
    simulation: Simulation, begin: Begin
) -> None:
    begin(1, DEVICE)
    made = dist.new_group(backend="cpu:gloo")
    assert isinstance(made, dist.ProcessGroup)
    assert made.backends() == []


def test_the_first_op_raises_what_went_wrong(
    simulation: Simulation, begin: Begin, make: Make
) -> None:
    begin(1, DEVICE)
    until(lambda: begun(simulation) == 1)
    simulation.init_fails[0] = "NCCL reports: no memory left"
    simulation.in_progress.add(0)  # so that none is split off the default group's
    group = make()
    until(lambda: group.aborted is not None)
    simulation.in_progress.clear()
    with pytest.raises(
        dist.DistAbortedError,
        match=r"all_reduce in group 'late' on rank 0: .*no memory left",
    ):
        dist.all_reduce(simulation.array([1.0], DEVICE), group=group)
    # The default group is not concerned.
    dist.all_reduce(simulation.array([1.0], DEVICE))


@pytest.mark.parametrize("end", [dist.abort_process_group, dist.destroy_process_group])
def test_it_can_end_while_it_begins(
    simulation: Simulation,
    begin: Begin,
    make: Make,
    end: Callable[[dist.ProcessGroup], None],
) -> None:
    begin(2, DEVICE)
    group = make()
    assert devices(group) == f"nccl (device {DEVICE}: init)"
    began = time.monotonic()
    end(group)
    assert time.monotonic() - began < CLOSE_WAIT
    if end is dist.abort_process_group:
        assert devices(group) == f"nccl (device {DEVICE}: aborted)"
        with pytest.raises(dist.DistAbortedError, match="group 'late' on rank 0"):
            dist.all_reduce(simulation.array([1.0], DEVICE), group=group)
