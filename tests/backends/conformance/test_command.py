"""The command line of the conformance suite, and what cannot be tried at all."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import rankscope as dist
from rankscope.backends.conformance.command_line import main
from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until

ROOT = Path(__file__).resolve().parents[3]


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


BAD = """
    class Old(Toy):
        interface_version = 0


    class NoArrays:
        def __init__(self, rank):
            pass


    def fail():
        raise OSError("no libtoy.so")


    def unmade(store, rank, size, timeout):
        raise KeyError("route")


    register = dist.Backend.register_backend
    register("old", Old)
    register("old_inside", lambda store, rank, size, timeout: Old(rank, size))
    register("unmade", unmade)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The modules `toy` and `raises` in a folder that modules are imported from."""
    source = textwrap.dedent(TOY).format(plus=0) + textwrap.dedent(BAD)
    (tmp_path / "toy.py").write_text(source, "utf-8")
    (tmp_path / "raises.py").write_text("\n1 / 0\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = {*dist.Backend.registry}
    yield tmp_path
    sys.modules.pop("toy", None)
    for name in {*dist.Backend.registry} - known:
        del dist.Backend.registry[name]


@pytest.mark.processes
def test_the_command_line_on_a_backend_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(textwrap.dedent(TOY).format(plus=1), "utf-8")
    arguments = ("toy", "--module", "toy", "-n", "1", "--levels", "exact")
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed   all_reduce" in done.stdout
    assert "rank 0: AssertionError: all_reduce(1, int8, SUM)" in done.stdout
    assert (
        "skipped  broadcast: backend 'toy' does not implement broadcast" in done.stdout
    )
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
        (["none"], "give --module MODULE, which registers the backend"),
        (["tcp", "--module", "not_there"], "not_there cannot be imported"),
        (["toy", "--module", "toy:nothing"], "has no attribute 'nothing'"),
        (["toy", "--module", "raises"], "raises cannot be imported: ZeroDivisionError"),
        (["toy", "--module", "raises"], "raises.py:2 in <module>"),
        (["toy", "--module", "toy:fail"], "toy:fail failed: OSError: no libtoy.so"),
        (["toy", "--module", "toy", "--arrays", "nowhere:A"], "No module named 'nowhe"),
        (["toy", "--module", "toy", "--arrays", "toy:A"], "has no attribute 'A'"),
        (
            ["toy", "--module", "toy", "--arrays", "toy:Toy"],
            "arrays toy:Toy: the call with rank=0 failed: TypeError",
        ),
        (
            ["toy", "--module", "toy", "--arrays", "toy:NoArrays"],
            "arrays toy:NoArrays: no empty, write, read, wait_blocks_host; expected",
        ),
        (
            ["old", "--module", "toy"],
            "backend 'old' is written for version 0 of the backend interface, and this "
            "Rankscope has version 1: update the package that provides the backend\n",
        ),
        (
            ["old_inside", "--module", "toy"],
            "rank 0: backend 'old_inside' is written for version 0 of the backend",
        ),
        (["unmade", "--module", "toy"], "its creator unmade raised KeyError: 'route'"),
        (["unmade", "--module", "toy"], "in unmade"),
        (["tcp", "--devices", "cuda"], "serves cpu and not 'cuda'"),
        (["tcp", "--levels", "exakt"], "did you mean exact?"),
        (["tcp", "-n", "0"], "expected e.g. 2, 1,2,4 or 1-4"),
    ],
)
def test_what_cannot_be_tried_ends_with_status_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    toy: Path,
) -> None:
    try:
        status: object = main([*arguments, *("-n", "1", "--launcher", "threads")])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.processes
def test_the_help_fits_a_screen_and_names_the_exit_statuses() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert "exit status: 0 every rule held" in done.stdout
    assert len(done.stdout.splitlines()) < 70


# -- the end of a run ------------------------------------------------------------

HANGS = """
    import time


    class Hangs(Toy):
        def all_reduce(self, tensor, op):
            if self.rank == 1:
                time.sleep(1000)
            return super().all_reduce(tensor, op)


    dist.Backend.register_backend(
        "hangs", lambda store, rank, size, timeout: Hangs(rank, size), devices="cpu"
    )
"""


@contextlib.contextmanager
def hanging(folder: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A run whose rank 1 hangs, and the process of that rank."""
    source = textwrap.dedent(TOY).format(plus=0) + textwrap.dedent(HANGS)
    (folder / "toy.py").write_text(source, "utf-8")
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "rankscope.conformance", "hangs"),
            *("--module", "toy", "--rules", "all_reduce", "--levels", "exact"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    try:

        def hung() -> psutil.Process | None:
            for child in psutil.Process(run.pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.environ().get("RANK") == "1":
                        return child
            return None

        rank = until(hung, 60, "rank 1 to start")
        assert rank is not None
        yield run, rank
    finally:
        run.kill()
        run.communicate()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_run_that_is_interrupted_ends_every_rank(
    tmp_path: Path, signum: int, status: int
) -> None:
    with hanging(tmp_path) as (run, rank):
        run.send_signal(signum)
        _, errors = run.communicate(timeout=30)
        assert run.returncode == status, errors
        assert errors.splitlines()[-1] == "interrupted; every rank was ended"
        until(lambda: not lives(rank), 30, "the end of the rank that hangs")


@pytest.mark.processes
def test_the_ranks_of_a_run_that_is_killed_end_by_themselves(tmp_path: Path) -> None:
    with hanging(tmp_path) as (run, rank):
        run.kill()
        run.wait(30)
        until(lambda: not lives(rank), 30, "the end of the rank that hangs")
