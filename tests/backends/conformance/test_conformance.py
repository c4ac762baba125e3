"""The conformance suite on the backends that keep its rules."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import rankscope as dist
from rankscope.backends.conformance.exact import WITH_REDUCE_OP, WITHOUT_REDUCE_OP
from rankscope.backends.conformance.mpi_ranks import mpiexec
from rankscope.backends.conformance.suite import RULES, select, try_on
from rankscope.backends.conformance.trial import DeviceArrays
from rankscope.backends.groups.watchdog import watchdog
from rankscope.backends.nccl import nccl4py
from rankscope.conformance import (
    MPI,
    BackendConformance,
    Options,
    Report,
    Setup,
    Threads,
    check_backend,
)
from tests.backends.conformance.runs import SMALL, text
from tests.backends.gpu_simulation import DeviceArray, Simulation
from tests.backends.interface.dummy import build

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def _no_watchdog() -> Iterator[None]:
    """Groups of ranks that are threads are watched by this process."""
    yield
    watchdog.stop()


class TestStore(BackendConformance):
    """The pytest mixin, on a complete backend in Python."""

    backend = "store"
    modules = ("tests.backends.store_backend:register",)
    levels = ("exact", "contract")
    launcher = "threads"
    options = SMALL


_needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


@pytest.mark.processes  # where no session is named
@pytest.mark.parametrize("name", ["tcp", pytest.param("gloo", marks=_needs_gloo)])
def test_tcp_and_gloo(name: str) -> None:
    setup = Setup(name, options=Options(timeout=20, running_times=2, abort_seconds=5))
    report = check_backend(setup, levels=["contract"])
    rules = ["all_reduce", "recv"]
    report.results += check_backend(setup, [3], levels=["recover"], rules=rules).results
    assert not report.failed, text(report)
    assert not report.skipped


@pytest.mark.processes
@pytest.mark.mpi
@pytest.mark.skipif(
    not dist.is_mpi_available() or mpiexec() is None, reason="no mpiexec here"
)
def test_mpi() -> None:
    setup = Setup("mpi", options=Options(timeout=20, running_times=2, abort_seconds=5))
    report = check_backend(setup, levels=["contract"], session=MPI)
    rules = ["all_reduce", "recv"]
    report.results += check_backend(
        setup, [3], levels=["recover"], rules=rules, session=MPI
    ).results
    assert not report.failed, text(report)
    assert not report.skipped


@pytest.mark.processes  # where no session is named
@pytest.mark.skipif(dist.unavailable_reason("ucx") is not None, reason="needs UCX")
@pytest.mark.parametrize("transports", ["all", "tcp,self"])
def test_ucx(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    setup = Setup("ucx", options=Options(timeout=20, running_times=2, abort_seconds=5))
    report = check_backend(setup, levels=["contract"])
    rules = ["all_reduce", "recv"]
    report.results += check_backend(setup, [3], levels=["recover"], rules=rules).results
    assert not report.failed, text(report)
    assert not report.skipped


def notice_board(folder: Path) -> str:
    """The backend in Python of notebook 03, as the module `notice_board`."""
    notebook = json.loads((ROOT / "notebooks" / "03_backends.ipynb").read_text("utf-8"))
    (source,) = (
        "".join(cell["source"])
        for cell in notebook["cells"]
        if "class NoticeBoard" in "".join(cell["source"])
    )
    head = "import numpy as np\nimport rankscope as dist\n"
    body = source.partition("\n")[2]  # without %%distributed
    (folder / "notice_board.py").write_text(head + body, encoding="utf-8")
    return "notice_board"


def test_the_backend_in_python_of_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = notice_board(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = check_backend(
        Setup("board", modules=(module,), options=SMALL),
        levels=["exact", "contract"],
        session=Threads,
    )
    del dist.Backend.registry["board"], sys.modules[module]
    assert not report.failed, text(report)
    skipped = {one.name: one.text for one in report.skipped}
    assert skipped["broadcast"] == "backend 'board' does not implement broadcast"
    assert {one.name for one in report.held} >= {"all_reduce", "all_gather", "barrier"}


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
@pytest.mark.timeout(300)  # the first run compiles
def test_the_backend_in_cpp_of_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(build()))
    report = check_backend(
        Setup("dummy", options=SMALL), levels=["exact", "contract"], session=Threads
    )
    # It sets every output to zero and waits for nobody, which the report says.
    assert {one.name for one in report.failed} >= {
        *("all_reduce", "reduce_scatter", "reduce_scatter_tensor"),
        *("all_gather", "all_gather_into_tensor", "coalesced"),
        *("returns at once", "runs in order"),
    }
    assert "was over before rank 1 entered it" in text(report)
    # The rest of the contract holds, and what it does not claim is skipped.
    held = {"reports start and end", "goes on alone"}
    assert {one.name for one in report.held} >= held, [one.name for one in report.held]
    assert {"barrier", "broadcast", "gather"} <= {one.name for one in report.skipped}


class SimulatedArrays:
    """Arrays on the simulated device of a rank."""

    wait_blocks_host = False

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation, self.rank = simulation, rank

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        return self.simulation.array(np.zeros(shape), self.rank, dtype)

    def write(self, array: DeviceArray, values: npt.ArrayLike) -> None:
        self.simulation.synchronize(self.rank)
        array[...] = values

    def read(self, array: DeviceArray) -> npt.NDArray[Any]:
        self.simulation.synchronize(self.rank)
        return np.asarray(array).copy()


class CupyArray(DeviceArray):
    """As cupy's: writes are ordered behind the stream, and ``get()`` copies."""

    simulation: ClassVar[Simulation]

    def __setitem__(self, place: Any, values: Any) -> None:
        self.simulation.synchronize(self.device)
        super().__setitem__(place, values)

    def get(self) -> npt.NDArray[Any]:
        self.simulation.synchronize(self.device)
        return np.asarray(self).copy()


@pytest.fixture
def cupy(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The part of cupy that `DeviceArrays` needs; returns the devices in use."""
    used: list[int] = []
    monkeypatch.setattr(CupyArray, "simulation", simulation, raising=False)

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def use(self) -> None:
            used.append(self.index)
            simulation.cuda.use(self.index)

    def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> CupyArray:
        made = np.full(shape, 1, dtype).view(CupyArray)
        made.device = simulation.cuda.current_device()
        return made

    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    module = SimpleNamespace(
        cuda=SimpleNamespace(Device=Device, runtime=runtime),
        empty=empty,
        asarray=np.asarray,
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return used


@pytest.mark.parametrize("named", [False, True])
def test_arrays_of_a_device_are_made_by_cupy_or_by_the_class_that_is_named(
    cupy: list[int], named: bool
) -> None:
    arrays = f"{DeviceArrays.__module__}:DeviceArrays" if named else ""
    setup = Setup("nccl", "cuda", arrays=arrays, options=SMALL)
    session = Threads(setup, 2)
    nccl4py.load()
    rules = ["all_reduce", "all_gather", "send_and_recv", "goes on alone"]
    report = Report("nccl")
    for rule in select(("exact", "contract"), rules):
        report.results.append(try_on(session, setup, rule))
    session.close()
    assert not report.failed, text(report)
    assert [one.name for one in report.held] == rules
    assert {*cupy} == {0, 1}


@pytest.mark.parametrize("size", [1, 2])
def test_nccl_over_the_simulation(simulation: Simulation, size: int) -> None:
    nccl = Setup("nccl", "cuda", options=SMALL)
    session = Threads(
        nccl,
        size,
        arrays=lambda rank: SimulatedArrays(simulation, rank),
        around=simulation.cuda.device,
    )
    nccl4py.load()
    # Not by `check_backend`, which asks whether there is a GPU.
    levels = ("exact", "contract") if size > 1 else ("exact",)
    simulated = Report("nccl")
    simulated.results += [try_on(session, nccl, rule) for rule in select(levels)]
    session.close()
    assert not simulated.failed, text(simulated)
    assert {one.name for one in simulated.held} >= {
        *WITH_REDUCE_OP,
        *WITHOUT_REDUCE_OP[:-1],
    }
    if size > 1:
        assert {one.name for one in simulated.held} >= {
            rule.name for rule in RULES if rule.level == "contract"
        }
