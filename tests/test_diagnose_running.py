"""``rankscope diagnose --pid`` and ``--jobs``: real processes, which then go on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope as dist
from rankscope.__main__ import main
from rankscope.backends.attach import py_spy
from rankscope.backends.attach.launchers import VARIABLES
from rankscope.backends.conformance.mpi_ranks import is_open_mpi, mpiexec
from rankscope.backends.conformance.waiting import until
from tests.environment import environment
from tests.running_jobs import (
    DEADLINE,
    Program,
    block_of,
    line_of,
    may_read,
    refused,
)

MPI = """
from mpi4py import MPI
import numpy as np
x = np.ones(1)
rank = MPI.COMM_WORLD.rank
note(f"rank {rank}")
if rank == 1:
    wait("go")
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)  # all
print(f"sum {x[0]}")
"""

ALONE = """
note("there")
wait("go")
print("end")
"""


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process, and what it starts, be no rank of anything."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.processes
@pytest.mark.mpi
@pytest.mark.skipif(
    not dist.is_mpi_available() or mpiexec() is None,
    reason="mpi4py or mpiexec is missing: pip install -e .[dev,mpi]",
)
def test_the_ranks_of_mpiexec(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = mpiexec()
    assert program is not None
    command = [program, "-n", "3", *["--oversubscribe"] * is_open_mpi()]
    environment = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_prte_tmpdir_base": str(tmp_path),
    }
    with Program(
        tmp_path, MPI, *command, sys.executable, environment=environment
    ) as job:
        job.wait_for("rank 0", "rank 1", "rank 2")
        readable = may_read(_pid_of_rank(job.process.pid, capsys, 1))
        everyone = line_of(job, "# all")

        def are_in() -> bool:
            # They have left their notes, and may not have come to the line yet.
            assert main(["diagnose", "--pid", str(job.process.pid)]) == 2
            out, err = capsys.readouterr()
            assert "no verdict" in err
            return not readable or f"ranks 0, 2 are at {everyone}" in out

        until(are_in, DEADLINE)
        # The status depends on the jobs of others, too.
        assert main(["diagnose", "--jobs"]) in (1, 2)
        title, *lines = block_of(capsys.readouterr().out, job.process.pid)
        assert title.startswith(f"mpiexec {job.process.pid} (")
        assert "ranks 0–2 of 3 (pid" in title
        if readable:
            assert any(line.startswith("  rank 1 is at program.py:") for line in lines)
            text = "`MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)  # all`"
            assert f"  ranks 0, 2 are at {everyone} in {text}" in lines
        else:
            assert refused("\n".join(lines))
        # What was looked at goes on, and is right.
        assert job.finish("go").count("sum 3.0") == 3


def _pid_of_rank(launcher: int, capsys: pytest.CaptureFixture[str], rank: int) -> int:
    assert main(["diagnose", "--json", "--pid", str(launcher)]) == 2
    (found,) = json.loads(capsys.readouterr().out)["jobs"]
    assert found["world_size"] == 3
    pids = {one["rank"]: one["pid"] for one in found["processes"]}
    return pids[rank]


@pytest.mark.processes
def test_a_python_without_a_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Program(tmp_path, ALONE) as program:
        program.wait_for("there")
        pid = program.process.pid
        assert main(["diagnose", "--pid", str(pid)]) == 2
        printed = capsys.readouterr()
        if not may_read(pid):
            assert refused(printed.out)
        else:
            assert f"process {pid} is at program.py:" in printed.out
            assert "does not say which ranks they are" in printed.out
        assert program.finish("go") == "end\n"


@pytest.mark.processes
def test_a_rank_of_others_that_are_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node1"}
    page = tmp_path / "page.html"
    with Program(tmp_path, ALONE, environment=environment) as program:
        program.wait_for("there")
        pid = program.process.pid
        assert main(["diagnose", "--pid", str(pid), "--html", str(page)]) == 2
        out = capsys.readouterr().out
        assert f"rank 5 of 8 (pid {pid})" in out
        assert "ranks 0–4, 6–7 are not looked at" in out
        if may_read(pid):
            assert "rank 5 is at program.py:" in out
            assert "program.py" in page.read_text()
        program.finish("go")


#: Rank 1 of two has launched one op less, as the service in rank 0 reports: NCCL's own
#: needs a GPU.
COUNTED = """
import json
from tests.backends.nccl.ras_service import Server, rank, report, service
pids = [os.getpid(), int(os.environ["OTHER"])]
counts = os.environ["COUNTS"]
asked = []
def said():
    asked.append(1)
    return json.dumps(report([
        rank(0, pids[0], 15 + (counts == "go on") * len(asked)),
        rank(1, pids[1], 15 if counts == "are equal" else 14),
    ], []))
server = Server(service(True, said), int(os.environ["NCCL_RAS_ADDR"].split(":")[1]))
note("there")
wait("go")
server.close()
"""


@pytest.mark.processes
@pytest.mark.parametrize("counts", ["stand still", "go on", "are equal"])
def test_what_nccl_counts_decides_where_it_stands_still(
    counts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_RAS_ADDR": f"localhost:{port}",
        "PYTHONPATH": environment()["PYTHONPATH"],
        "COUNTS": counts,
    }
    late = Program(folders[1], ALONE, environment={**common, "RANK": "1"})
    rank = {**common, "RANK": "0", "OTHER": str(late.process.pid)}
    with late, Program(folders[0], COUNTED, environment=rank) as first:
        late.wait_for("there")
        first.wait_for("there")
        pids = [str(first.process.pid), str(late.process.pid)]
        status = main(["diagnose", "--pid", *pids])
        out = capsys.readouterr().out
        if counts == "go on":
            assert status == 2
            assert "ranks have issued ops between two reports" in out
        elif counts == "are equal":
            assert status == 2
            assert "all ranks have launched as many ops" in out
        else:
            assert status == 1
            assert "rank 1 has not entered all_reduce #15" in out
            assert "read: ranks 0–1 of 2" in out
        late.finish("go")
        first.finish("go")


@pytest.mark.processes
def test_processes_that_cannot_be_looked_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            assert main(["diagnose", "--pid", str(sleeper.pid)]) == 2
            assert f"process {sleeper.pid} (sleep) is no Python" in _err(capsys)
        finally:
            sleeper.kill()
    assert main(["diagnose", "--pid", str(sleeper.pid)]) == 2
    assert f"there is no process {sleeper.pid}" in _err(capsys)
    with pytest.raises(py_spy.PySpyError, match="the process has ended"):
        py_spy.dump(py_spy.find_py_spy(), sleeper.pid)


@pytest.mark.processes
def test_without_py_spy_the_job_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}
    with Program(tmp_path, ALONE, environment=environment) as program:
        program.wait_for("there")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(tmp_path / "python"))
            patch.setenv("PATH", str(tmp_path))
            assert main(["diagnose", "--pid", str(program.process.pid)]) == 2
        printed = capsys.readouterr()
        assert f"rank 0 of 1 (pid {program.process.pid})" in printed.out
        assert "rank 0: py-spy is missing" in printed.out
        assert "[attach]" in printed.err
        program.finish("go")


@pytest.mark.processes
def test_an_interrupt_ends_it_without_a_traceback(tmp_path: Path) -> None:
    slow = tmp_path / "py-spy"
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/began\nexec sleep 60\n")
    slow.chmod(0o755)
    code = (
        "import sys; from rankscope.backends.attach import py_spy\n"
        "from rankscope import attach; from rankscope.__main__ import main\n"
        f"attach.find_py_spy = lambda: {str(slow)!r}\n"
        "sys.exit(main(['diagnose', '--pid', sys.argv[1]]))"
    )
    with Program(tmp_path, ALONE) as program:
        program.wait_for("there")
        command = [sys.executable, "-c", code, str(program.process.pid)]
        # As in a terminal, an interrupt is for all processes of its group.
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as diagnosis:
            until((tmp_path / "began").exists, DEADLINE)
            os.killpg(diagnosis.pid, signal.SIGINT)
            _, error = diagnosis.communicate(timeout=DEADLINE)
        assert diagnosis.returncode == 130
        assert error == "rankscope diagnose: interrupted\n"
        program.finish("go")


# -- without a process -----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--jobs", "--pid", "1"], "name one"),
        (["job/", "--jobs"], "--jobs looks at what runs: it takes no CLUSTER"),
        (["job/", "--pid", "1"], "--pid looks at what runs: it takes no CLUSTER"),
        (["--jobs", "--trace", "x"], "--trace is for a PATH, not for --jobs"),
    ],
)
def test_combinations_that_mean_nothing(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", *arguments]) == 2
    assert text in _err(capsys)


def test_the_help_tells_of_running_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diagnose", "--help"])
    out = capsys.readouterr().out
    for word in ("--pid PID", "--jobs", "notebook_launcher", "rankscope[attach]"):
        assert word in out


def test_py_spy_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(py_spy.PySpyError, match=r"pip install .*\[attach\]"):
        py_spy.find_py_spy()


@pytest.mark.parametrize(
    ("scope", "user", "text"),
    [
        ("1", 1000, "ptrace_scope is 1: run as root, or .* sudo sysctl"),
        ("2", 1000, "ptrace_scope is 2: run as root$"),
        ("3", 1000, "ptrace_scope is 3: nobody"),
        ("0", 1000, "SYS_PTRACE"),
        ("x", 1000, "SYS_PTRACE"),
        ("0", 0, "does not let root read it: .*SYS_PTRACE"),
        ("0", 1001, "another user's: run as that user or as root"),
    ],
)
def test_what_to_do_where_a_process_may_not_be_read(
    scope: str,
    user: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "ptrace_scope"
    file.write_text(scope)
    monkeypatch.setattr(py_spy, "_SCOPE", file)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(py_spy, "_owner", lambda pid: min(user, 1000))
    assert re.search(text, py_spy.refusal(os.getpid()))


def _err(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err
