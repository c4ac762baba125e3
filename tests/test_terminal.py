"""``rankscope abort`` and the like, beside a notebook whose cell hangs."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from rankscope import attach, terminal
from rankscope.__main__ import main
from rankscope.backends.conformance.waiting import until
from rankscope.engines import ClusterError
from rankscope.engines.launch import cluster_file
from rankscope.engines.launch.cluster_file import ClusterFile
from rankscope.engines.observe import metrics, spans
from rankscope.engines.script import metrics_process
from rankscope.engines.wire.job_file import JobFile
from rankscope.terminal import COMMANDS, Running
from tests.magics.kernels import Kernel, running_kernel
from tests.terminals import Terminal

WAIT = 60


# -- finding ----------------------------------------------------------------------


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of two clusters and of a job: of all this process is the one that runs."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "security").mkdir()
    for name, notebook in (("rankscope-aa11", "a.ipynb"), ("rankscope-aa22", "b/c.py")):
        monkeypatch.setattr(
            cluster_file, "_notebook", lambda notebook=notebook: notebook
        )
        file = ClusterFile.of(name, str(tmp_path), os.getpid(), [], None)
        file.connection_file.touch()
        file.write()
    JobFile("10.0.0.1", 29400, "ab", "train.py", os.getpid(), "elsewhere").write()
    JobFile("127.0.0.1", 29401, "ab", "eval.py", os.getpid(), "elsewhere").write()
    return tmp_path


def test_with_several_and_none_named_it_lists_them(
    several: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["CLUSTER", "RANKS", "NOTEBOOK", "SINCE"]
    assert {row.split()[0] for row in rows} == {
        "rankscope-aa11",
        "rankscope-aa22",
        "10.0.0.1:29400",
    }
    assert f"a.ipynb (pid {os.getpid()} on " in "\n".join(rows)
    for command in ("diagnose", "abort", "rebuild", "stop"):
        assert main([command]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(
            f"rankscope {command}: several clusters run: name the one that is meant\n"
        )
        assert "rankscope-aa22" in err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aa", "several clusters are called 'aa'"),
        ("rankscope-aa", "several clusters are called 'rankscope-aa'"),
        ("z", "no cluster is called 'z'; there are"),
        ("aa1", "attached to rankscope-aa11"),
        ("rankscope-aa22", "attached to rankscope-aa22"),
        ("c.py", "attached to rankscope-aa22"),
        ("b/c.py", "attached to rankscope-aa22"),
        ("train.py", "attached to 10.0.0.1:29400"),
        ("10.0.0.1:29400", "attached to 10.0.0.1:29400"),
    ],
)
def test_a_cluster_is_found_by_its_name(
    several: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    said: str,
) -> None:
    def attach(one: Running, attends: bool) -> NoReturn:
        raise ClusterError(f"attached to {one.name}")

    monkeypatch.setattr(Running, "attach", attach)
    assert main(["abort", name]) == 2
    assert said in capsys.readouterr().err


def test_without_any_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    # Others' jobs may run here.
    monkeypatch.setattr(attach, "watched_jobs", list)
    for command in ("status", "stop"):
        assert main([command]) == 2
        out, err = capsys.readouterr()
        assert "no cluster or watched job of yours runs here" in out + err


def test_a_watched_job_whose_ranks_have_not_met_is_told_by_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    job, looked = object(), list[object]()

    def look(jobs: list[object], _: object) -> int:
        looked.extend(jobs)
        return 2

    monkeypatch.setattr(attach, "watched_jobs", lambda: [job])
    monkeypatch.setattr(attach, "run_watched", look)
    assert main(["diagnose"]) == 2
    assert looked == [job]
    assert main(["abort"]) == main(["diagnose", "train.py"]) == main(["status"]) == 2
    assert looked == [job]
    out, err = capsys.readouterr()
    assert (out + err).count("have not met yet, or rank 0 has ended") == 3


@pytest.mark.processes
@pytest.mark.parametrize("command", ["status", "doctor", "diagnose --jobs --json"])
def test_a_reader_that_has_enough_is_no_error(tmp_path: Path, command: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            # Without a buffer, as where the output is longer than it.
            [sys.executable, "-u", "-m", "rankscope", *command.split()],
            stdout=writes,
            stderr=subprocess.PIPE,
            env={**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path)},
            text=True,
            check=False,
            timeout=WAIT,
        )
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_the_live_view_says_what_it_lacks(
    several: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "aa1"]) == 2
    assert "it needs a terminal (with ssh: ssh -t)" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["top", "aa1", "-d", "0"]) == 2
    assert "-d 0: at least 0.1 seconds are expected" in capsys.readouterr().err
    assert main(["top"]) == 2
    assert "several clusters run: name the one" in capsys.readouterr().err
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    assert main(["top", "aa1"]) == 2
    assert re.search(
        r"it needs Textual: .*pip install .*\[top\]", capsys.readouterr().err
    )


def test_metrics_are_served_until_the_end(
    several: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[object] = []

    class Attached:
        cluster_id, closed = "rankscope-aa11", False

        def __enter__(self) -> Attached:
            return self

        def __exit__(self, *_: object) -> None:
            served.append("detached")

    class Server:
        address = "http://127.0.0.1:9464/metrics"

        def __init__(self, cluster: Attached, port: int, spans: None) -> None:
            if port == 80:
                raise ClusterError("port 80 of 127.0.0.1: Permission denied")
            served.append(port)
            cluster.closed = True

        def close(self) -> None:
            served.append("closed")

    def attach(one: Running, attends: bool) -> Attached:
        assert not attends, "at night the ranks are to write a report of a hang"
        return Attached()

    monkeypatch.setattr(Running, "attach", attach)
    monkeypatch.setattr(metrics, "MetricsServer", Server)
    monkeypatch.setattr(spans, "spans_if_installed", lambda cluster: None)
    assert main(["metrics", "aa1", "-p", "0"]) == 0
    assert served == [0, "closed", "detached"]
    out = capsys.readouterr().out
    assert "rankscope-aa11 are at http://127.0.0.1:9464/metrics" in out
    assert main(["metrics", "aa1", "-p", "80"]) == 2
    said = capsys.readouterr().err
    assert "port 80 of 127.0.0.1: Permission denied" in said
    monkeypatch.setattr(metrics_process, "find_spec", lambda name: None)
    assert main(["metrics", "aa1"]) == 2
    assert re.search(r"pip install .*\[metrics\]", capsys.readouterr().err)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for command in (*COMMANDS, "top", "doctor"):
        assert f"\n    {command} " in text
    with pytest.raises(SystemExit) as ended:
        main(["abort", "--gruop", "x"])
    assert ended.value.code == 2


# -- acting -----------------------------------------------------------------------

#: Both ranks wait for ever, and an abort ends both.
HANG = (
    "%%distributed",
    "x = np.ones(3)",
    "print('in', flush=True)",
    "dist.all_reduce(x) if rank == 0 else dist.recv(x, 0)",
)

#: The board's text, as the notebook has it.
BOARD = (
    "from rankscope.magics import current_cluster",
    "from rankscope.widgets.board.model import BoardModel",
    "print(BoardModel.of(current_cluster().status(fresh=True)).banner())",
)


@pytest.fixture(scope="module")
def kernel(_module_leaves_nothing: None) -> Iterator[Kernel]:
    """A kernel with two ranks, whose notebook has a name."""
    with running_kernel(JPY_SESSION_NAME="work/train.ipynb") as kernel:
        kernel("%dist_init -n 2 --timeout 600")
        kernel("from rankscope.magics import current_cluster")
        yield kernel


def _hang(kernel: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    """Wait until the command line, too, sees the hang."""

    def hangs() -> bool:
        found = main(["diagnose"]) == 1
        return "all_reduce" in capsys.readouterr().out and found

    until(hangs, WAIT, "the diagnosis of the hang")


@pytest.mark.processes
def test_an_abort_ends_the_hang_and_says_why(
    kernel: Kernel, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = {}
    picture = tmp_path / "profile.html"

    def act() -> None:
        _hang(kernel, capsys)
        assert main(["status", "train.ipynb"]) == 0
        told["status"] = capsys.readouterr().out
        assert main(["profile"]) == 0
        told["now"] = capsys.readouterr().out
        assert main(["profile", "-t", "0.2", "-o", str(picture)]) == 0
        told["profile"] = capsys.readouterr().out
        assert main(["profile", "-o", str(picture)]) == 2
        told["refused"] = capsys.readouterr().err
        assert main(["abort"]) == 0
        told["abort"] = capsys.readouterr().out

    cell = kernel(*HANG, when={"in": act})
    verdict = "ranks 0–1 wait for each other: rank 0 in all_reduce #1"
    assert verdict in told["abort"]
    assert "group 'default' aborted; " in told["abort"]
    assert "all_reduce" in told["status"]
    assert "rank 0: at cell " in told["now"]
    assert "in all_reduce" in told["now"]
    # 0.2, and what a busy machine adds.
    assert re.match(r"ranks 0–1, sampled for 0\.[2-9] s\n", told["profile"])
    assert "rankscope-flame" in picture.read_text(encoding="utf-8")
    assert "-t SECONDS is missing" in told["refused"]
    assert f"Why: {verdict}" in cell.error
    assert re.search(r"; abort requested from a terminal at [\d:]+ Next: ", cell.error)
    banner = kernel(*BOARD).stream()
    assert banner.startswith(f"Aborted: Group 'default', before the abort: {verdict}")
    assert main(["diagnose"]) == 0
    aborted = "nothing hangs: .*; group 'default' is aborted: %dist_rebuild, or "
    assert re.match(aborted, capsys.readouterr().out)
    assert main(["rebuild", "-g", "default"]) == 0
    assert capsys.readouterr().out == "group 'default' rebuilt\n"
    assert main(["diagnose"]) == 0
    assert capsys.readouterr().out.endswith("no op is stuck, every rank answers\n")
    again = kernel("%%distributed", "dist.all_reduce(x := np.ones(1))", "print(x)")
    assert "[0-1] [2.]" in again.stream(), again.error


@pytest.mark.processes
def test_it_needs_nothing_of_the_kernel(
    kernel: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = kernel.manager.provisioner.pid

    def act() -> None:
        _hang(kernel, capsys)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert main(["abort", "--group", "default"]) == 0
            told = capsys.readouterr().out
        finally:
            os.kill(pid, signal.SIGCONT)
        assert "group 'default' aborted" in told
        assert main(["abort", "--group", "nonesuch"]) == 2
        assert "nonesuch" in capsys.readouterr().err

    cell = kernel(*HANG, when={"in": act})
    assert "; abort requested from a terminal at " in cell.error
    assert kernel("%dist_rebuild").error == ""


@pytest.mark.processes
def test_the_live_view_shows_the_hang_and_aborts_it(kernel: Kernel) -> None:
    command = [sys.executable, "-m", "rankscope", "top", "train.ipynb", "-d", "0.2"]

    def act() -> None:
        with Terminal(command) as terminal:
            terminal.until("Ranks 0–1 wait for each other", WAIT)
            terminal.press("a")
            terminal.until("Abort group 'default' of ranks 0–1?", WAIT)
            terminal.press("y")
            terminal.until("Group 'default' aborted", WAIT)
            terminal.press("q")
            assert terminal.end(WAIT) == 0

    cell = kernel(*HANG, when={"in": act})
    assert "; abort requested from a terminal at " in cell.error
    assert kernel("%dist_rebuild").error == ""


@pytest.mark.processes
def test_a_frozen_rank_is_known_by_the_file(
    kernel: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = kernel("print(current_cluster().pids[1])").stream()
    frozen = psutil.Process(int(printed))
    frozen.suspend()
    try:
        until(
            lambda: frozen.status() == psutil.STATUS_STOPPED, WAIT, "the rank to stop"
        )
        assert main(["abort"]) == 2
        out, err = capsys.readouterr()
        assert "rank 1" in out
        assert "its process is stopped" in out
        assert "rank 1: no answer within" in err
    finally:
        frozen.resume()
    # It aborts its groups as soon as it goes on.
    until(lambda: kernel("%dist_rebuild").error == "", WAIT, "the rebuild")


@pytest.mark.processes
def test_stop_ends_the_cluster_and_the_notebook_says_so(
    kernel: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = kernel("print(*current_cluster().pids.values())").stream().split()
    engines = [psutil.Process(int(pid)) for pid in pids]

    def act() -> None:
        _hang(kernel, capsys)
        command = [sys.executable, "-m", "rankscope", "stop", "train.ipynb"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=WAIT
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("ranks 0–1 of rankscope-")

    cell = kernel(*HANG, when={"in": act})
    assert "the cluster was stopped from a terminal at " in cell.error
    assert not any(one.is_running() for one in engines)
    assert main(["status"]) == 2
    assert capsys.readouterr().out.startswith("no cluster ")
    after = kernel("%%distributed", "rank").stream("stderr")
    assert "the cluster was stopped from a terminal at " in after
    assert "%dist_init starts others" in after
    # The notebook is usable.
    assert kernel("%dist_init -n 1").error == ""
    assert kernel("%%distributed", "print(world_size)").stream() == "1\n"
    assert "1 rank ended" in str(kernel("%dist_shutdown").data)


def test_a_script_in_this_folder_is_its_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not what a dead job has left, as other paths are."""
    (tmp_path / "train.py").touch()
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    asked: list[str | None] = []

    def run(values: argparse.Namespace) -> int:
        asked.append(values.cluster)
        return 0

    monkeypatch.setattr("rankscope.terminal.run", run)
    monkeypatch.setattr("rankscope.post_mortem.run", lambda values: 1)
    assert main(["diagnose", "train.py"]) == 0
    assert main(["diagnose", "./train.py"]) == 1
    assert main(["diagnose", "logs"]) == 1
    assert asked == ["train.py"]
