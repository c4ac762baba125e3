"""The conformance suite: that each rule can fail, and who keeps them all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rankscope as dist
from rankscope.backends.conformance.command_line import main
from rankscope.backends.conformance.exact import WITH_REDUCE_OP, WITHOUT_REDUCE_OP
from rankscope.backends.conformance.mpi_ranks import mpiexec
from rankscope.backends.conformance.rules import LEVELS, RULES, select
from rankscope.backends.conformance.suite import try_on
from rankscope.backends.groups.watchdog import watchdog
from rankscope.backends.nccl import loader
from rankscope.conformance import (
    MPI,
    BackendConformance,
    Options,
    Processes,
    Report,
    Setup,
    Threads,
    check_backend,
)
from tests.backends.conformance import broken_backends
from tests.backends.gpu_simulation import DeviceArray, Simulation
from tests.backends.interface.dummy import build
from tests.backends.store_backend import StoreBackend

ROOT = Path(__file__).resolve().parents[3]

# Little of everything: what a rule says is tried, not how often.
SMALL = Options(
    timeout=6,
    sizes=(0, 7),
    reducible=("uint8", "float64"),
    movable=("uint8", "complex64"),
    cycles=4,
    running_bytes=2 << 20,
    running_times=2,
)


@pytest.fixture(scope="module", autouse=True)
def _no_watchdog() -> Iterator[None]:
    """Groups of ranks that are threads are watched by this process."""
    yield
    watchdog.stop()


def text(report: Report) -> str:
    return "\n".join(line for result in report.failed for line in result.lines())


# -- each rule can fail --------------------------------------------------------

ON_THREADS = [
    kind
    for kind, failing in broken_backends.BROKEN.items()
    if not any(name.startswith("recover") for name in failing)
]


@pytest.fixture
def broken() -> Iterator[None]:
    """The broken backends, registered; what they left is freed."""
    names = set(dist.Backend.registry)
    broken_backends.register()
    yield
    while broken_backends.LEFT:
        broken_backends.LEFT.pop()()
    for name in set(dist.Backend.registry) - names:
        del dist.Backend.registry[name]


@pytest.mark.parametrize("kind", ON_THREADS, ids=lambda kind: kind.__name__)
def test_a_broken_backend_fails_its_rule_and_no_other(
    broken: None, kind: type[StoreBackend]
) -> None:
    failing = broken_backends.BROKEN[kind]
    (level,) = {name.partition(":")[0] for name in failing}
    report = check_backend(
        Setup(kind.__name__.lower(), options=SMALL), levels=[level], session=Threads
    )
    assert {f"{one.level}: {one.name}" for one in report.failed} == failing, text(
        report
    )
    assert len(report.held) > 5
    for one in report.failed:
        assert "rank" in one.text


@pytest.mark.processes  # where no session is named
def test_a_backend_that_does_not_recover_fails_in_that_op_alone() -> None:
    setup = Setup(
        "dieswiththepeer",
        modules=("tests.backends.conformance.broken_backends:register",),
        options=SMALL,
    )
    rules = ["gather", "scatter", "barrier"]
    report = check_backend(setup, levels=["recover"], rules=rules)
    assert [one.name for one in report.failed] == ["gather"]
    assert "the library needs a restart" in report.failed[0].text
    assert [one.name for one in report.held] == ["scatter", "barrier"]


def test_every_rule_of_the_contract_has_a_backend_that_breaks_it() -> None:
    broken = {name for names in broken_backends.BROKEN.values() for name in names}
    contract = {
        f"{rule.level}: {rule.name}" for rule in RULES if rule.level == LEVELS[1]
    }
    assert contract <= broken
    assert {name.partition(":")[0] for name in broken} == set(LEVELS)


# -- who keeps them ------------------------------------------------------------


class TestStore(BackendConformance):
    """The pytest mixin, on a complete backend in Python."""

    backend = "store"
    modules = ("tests.backends.store_backend:register",)
    levels = ("exact", "contract")
    launcher = "threads"
    options = SMALL


@pytest.mark.processes  # where no session is named
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_gloo() -> None:
    setup = Setup("gloo", options=Options(timeout=20, running_times=2, abort_seconds=5))
    report = check_backend(setup, levels=["contract"])
    rules = ["all_reduce", "recv"]
    report.results += check_backend(setup, [3], levels=["recover"], rules=rules).results
    assert not report.failed, text(report)
    assert not report.skipped


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


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
@pytest.mark.timeout(300)  # the first run compiles
def test_the_backend_in_cpp_of_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(build()))
    report = check_backend(
        Setup("dummy", options=SMALL), levels=["exact", "contract"], session=Processes
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


@pytest.mark.parametrize("size", [1, 2])
def test_nccl_over_the_simulation(simulation: Simulation, size: int) -> None:
    nccl = Setup("nccl", "cuda", options=SMALL)
    session = Threads(
        nccl,
        size,
        arrays=lambda rank: SimulatedArrays(simulation, rank),
        around=simulation.cuda.device,
    )
    loader.load()
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


# -- the command line ----------------------------------------------------------


def command(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rankscope.conformance", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
    )


TOY = """
    import numpy as np
    import rankscope as dist


    class Toy(dist.Backend):
        interface_version = 1

        def all_reduce(self, tensor, op):
            work = dist.Work(dist.OpType.ALL_REDUCE)
            work.mark_started()
            tensor += {plus}
            work.mark_completed()
            return work


    dist.Backend.register_backend(
        "toy", lambda store, rank, size, timeout: Toy(rank, size), devices="cpu"
    )
"""


def test_the_command_line_on_a_backend_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(textwrap.dedent(TOY).format(plus=1), "utf-8")
    arguments = ("toy", "--module", "toy", "-n", "1", "--levels", "exact")
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed   all_reduce" in done.stdout
    assert "rank 0: AssertionError: all_reduce(1, int8, SUM)" in done.stdout
    assert "skipped  broadcast" in done.stdout
    assert "backend 'toy' does not implement broadcast" in done.stdout
    assert "backend 'toy' does not conform (exact: all_reduce; " in done.stdout

    # On one rank, a sum is what there was.
    (tmp_path / "toy.py").write_text(textwrap.dedent(TOY).format(plus=0), "utf-8")
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("backend 'toy' conforms; ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "no backend 'none' is registered"),
        (["none"], "give --module where the backend is registered"),
        (["gloo", "--module", "not_there"], "not_there cannot be imported"),
        (["gloo", "--devices", "cuda"], "serves cpu and not 'cuda'"),
        (["gloo", "--levels", "exakt"], "did you mean exact?"),
        (["gloo", "-n", "0"], "expected e.g. 2, 1,2,4 or 1-4"),
    ],
)
def test_what_cannot_be_tried_ends_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not dist.is_gloo_available() and "--devices" in arguments:
        pytest.skip("needs gloo")
    try:
        status: object = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_the_help_fits_a_screen_and_names_the_exit_statuses() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert "exit status: 0 every rule held" in done.stdout
    assert len(done.stdout.splitlines()) < 70


def test_a_failed_session_is_followed_by_a_fresh_one(broken: None) -> None:
    setup = Setup(
        "wrongroot",
        modules=("tests.backends.conformance.broken_backends:register",),
        options=SMALL,
    )
    rules = ["reduce", "broadcast"]
    report = check_backend(setup, rules=rules, levels=["exact"], session=Processes)
    assert [(one.name, one.status) for one in report.results] == [
        ("reduce", "failed"),
        ("broadcast", "held"),
    ]
