"""Programs for torch.distributed, on tcp, MPI, UCX, and NCCL over the simulation."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.mpi_ranks import MPIRanks, mpiexec
from rankscope.backends.conformance.ranks import Rank, Ranks
from rankscope.backends.interface import staging
from tests.backends import gpu_ranks
from tests.backends.collectives import torch_programs
from tests.backends.collectives.torch_programs import ON_A_GROUP, ON_THE_WORLD, Place
from tests.backends.gpu_simulation import Simulation

BACKENDS = [
    "tcp",
    pytest.param(
        "mpi", marks=pytest.mark.skipif(mpiexec() is None, reason="needs mpiexec")
    ),
    pytest.param(
        "ucx",
        marks=pytest.mark.skipif(
            dist.unavailable_reason("ucx") is not None, reason="needs UCX"
        ),
    ),
]

#: Seconds that a program may take: the machine may be busy with other tests.
LIMIT = 60


def _rank(me: Rank, backend: str) -> None:
    """Run the programs that the test names, in a world that lives through all."""
    with me.store() as store:
        dist.init_process_group(
            backend, store=store, rank=me.rank, world_size=me.size, timeout=50
        )
        place = Place(dist.group.WORLD, store=store)
        while (name := me.listen(170)) is not None:
            try:
                getattr(torch_programs, name)(place)
            except Exception:  # noqa: BLE001 - the test shows it
                me.report(traceback.format_exc())
            else:
                me.report("")
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=BACKENDS)
def world(
    request: pytest.FixtureRequest, _module_leaves_nothing: None
) -> Iterator[Ranks]:
    """Four ranks that run programs until they are told ``None``."""
    kind = MPIRanks if request.param == "mpi" else Ranks
    with kind(torch_programs.SIZE, _rank, request.param, timeout=170) as started:
        yield started
        for rank in range(torch_programs.SIZE):
            started.tell(rank, None)
        started.wait()


@pytest.mark.processes
@pytest.mark.parametrize("program", [*ON_A_GROUP, *ON_THE_WORLD])
def test_a_program_runs_on_ranks(
    world: Ranks, program: Callable[[Place], None]
) -> None:
    for rank in range(torch_programs.SIZE):
        world.tell(rank, program.__name__)
    errors = [world.next_report(rank, LIMIT) for rank in range(torch_programs.SIZE)]
    assert not any(errors), "\n".join(errors)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch, simulation: Simulation) -> None:
    """Have objects copied to the simulated GPU, as by cupy to a real one."""

    def to_device(host: np.ndarray, index: int | None) -> Any:
        place = simulation.cuda.current_device() if index is None else index
        return simulation.array(host, place or 0)

    monkeypatch.setattr(staging, "_copies", {})
    dist.register_staging("cuda", np.array, np.copyto, to_device)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("program", ON_A_GROUP)
def test_a_program_runs_on_simulated_gpus(
    ranks: gpu_ranks.Ranks, program: Callable[[Place], None]
) -> None:
    def body(r: gpu_ranks.Rank) -> None:
        def array(values: Any, dtype: Any = None) -> Any:
            return r.array(np.asarray(values, dtype))

        def host(array: Any) -> Any:
            r.synchronize()
            return np.asarray(array)

        program(Place(r.pg, array, host))

    ranks.start(torch_programs.SIZE, timeout=50)(body)
