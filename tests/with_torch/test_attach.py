"""A notebook that attaches to a script under torchrun: sees it, and may abort it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rankscope.__main__ import main
from rankscope.backends.observe.verdicts import Fault
from rankscope.engines import ClusterError, Job
from rankscope.engines.wire.job_file import job_files
from tests.with_torch.scripts import DEADLINE, RUN, Torchrun, until, verdict, waiting

#: Rank 1 computes while the others wait for it in line `LINE` of the script.
HANG = """
x = torch.ones(4)
dist.all_reduce(x)
if rank == 1:
    wait("go")
dist.all_reduce(x)  # the line
"""

#: The same in a function, for a script whose error is read.
TRAIN = """
def train():
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 1:
        wait("go")
    dist.all_reduce(x)
"""


def test_the_job_is_seen_and_nothing_else_can_be_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Torchrun(3, HANG, tmp_path) as script, script.attach() as job:
        until(lambda: waiting(job, 0, 2), script)
        lines = script.script.read_text().splitlines()
        line = 1 + next(i for i, one in enumerate(lines) if one.endswith("# the line"))
        ranks = job.status(fresh=True).ranks
        assert {one.state for one in ranks} == {"busy"}
        assert len({one.pid for one in ranks}) == 3
        group = ranks[2].group("default_pg")
        assert group is not None
        assert group.library == "torch"
        assert group.ranks == (0, 1, 2)
        assert group.state == "ready"
        oldest = group.oldest
        assert oldest is not None
        assert (oldest.op, oldest.sizes, oldest.dtypes) == (
            "all_reduce",
            ((4,),),
            ("float32",),
        )
        assert oldest.source == f"train.py:{line}"
        late = ranks[1].group("default_pg")
        assert late is not None
        assert late.oldest is None
        found = verdict(job)
        assert found.fault is Fault.RANK_BUSY_ELSEWHERE
        assert found.culprits == (1,)
        assert ": it is at train.py:" in str(found)
        assert "in wait" in job.where(1)[1]
        assert set(job.flight_records().dumps) == {0, 1, 2}
        with pytest.raises(ClusterError, match="does not allow notebooks to abort"):
            job.abort()
        with pytest.raises(ClusterError, match="are those of a script"):
            job.rebuild()
        # The rank itself refuses, too.
        job.allow_abort = True
        with pytest.raises(ClusterError, match="RANKSCOPE_ALLOW_ABORT=1"):
            job.abort()
        # Nor may a terminal, which sees the same.
        assert main(["diagnose", job.cluster_id]) == 1
        assert ": it is at train.py:" in capsys.readouterr().out
        assert main(["abort"]) == 2
        assert "does not allow" in capsys.readouterr().err
        assert main(["stop"]) == 2
        assert "who started it ends it" in capsys.readouterr().err
        assert waiting(job, 0, 2)
        script.let("go")
        assert script.finish() == 0, script.output
        until(lambda: job.closed)
        assert job.ended is not None
        assert "its script has ended" in job.ended
        with pytest.raises(ClusterError, match=r"train\.py: the job has ended"):
            job.diagnose()
        assert job.glance().state == "stopped"
    assert job_files() == []
    host, port = job.cluster_id.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_a_wrong_key_gets_no_information(tmp_path: Path) -> None:
    with Torchrun(2, HANG, tmp_path) as script:
        address, key = script.printed()
        assert key is not None
        other = format(int(key, 16) ^ 1, f"0{len(key)}x")
        with pytest.raises(ClusterError, match="its key is another one"):
            Job.attach(address, other)
        with pytest.raises(ClusterError, match="no hexadecimal number"):
            Job.attach(address, "secret")
        # A job of this user is found, with its key, by its file.
        (file,) = job_files()
        assert (file.address, file.key) == (address, key)
        assert file.path.stat().st_mode & 0o777 == 0o600
        with Job.attach() as job:
            assert job.n == 2
        script.let("go")
        assert script.finish() == 0, script.output
    with pytest.raises(ClusterError, match="no job listens"):
        Job.attach(address, key)


def test_an_abort_from_the_notebook_ends_all_ranks_with_the_verdict(
    tmp_path: Path,
) -> None:
    allowed = {"RANKSCOPE_ALLOW_ABORT": "1"}
    with (
        Torchrun(4, TRAIN + RUN, tmp_path, env=allowed) as script,
        script.attach() as job,
    ):
        until(lambda: waiting(job, 0, 2, 3), script)
        verdict(job)
        assert set(job.abort(reason="enough")) == {0, 1, 2, 3}
        errors = {rank: script.read(f"error.{rank}") for rank in (0, 2, 3)}
        script.let("go")
        errors[1] = script.read("error.1")
        for rank, error in errors.items():
            assert "DistAbortedError" in error, error
            assert f"of torch's group 'default_pg' on rank {rank} (" in error
            assert "): the group was aborted: " in error
            assert "was aborted: rank 1 has not entered" in error
            assert re.search(r"; enough \(at [\d:]+, by the notebook\)", error)
        assert script.finish() != 0
        until(lambda: job.closed)


def test_an_abort_from_a_terminal_that_the_script_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = {"RANKSCOPE_ALLOW_ABORT": "1"}
    with Torchrun(4, TRAIN + RUN, tmp_path, env=allowed) as script:
        with script.attach() as job:
            until(lambda: waiting(job, 0, 2, 3), script)
            verdict(job)
            address = job.cluster_id
        assert main(["abort", address]) == 0
        said = capsys.readouterr().out
        assert "rank 1 has not entered" in said
        assert "the script's ops end with an error that says why" in said
        errors = [script.read(f"error.{rank}") for rank in (0, 2, 3)]
        script.let("go")
        errors.append(script.read("error.1"))
        for error in errors:
            assert "was aborted: rank 1 has not" in error
            assert "; abort requested from a terminal at " in error
        assert script.finish() != 0


@pytest.mark.parametrize("arrival", range(2))
def test_an_abort_by_a_rank_reaches_all_ranks_without_a_notebook(
    tmp_path: Path, arrival: int
) -> None:
    # gloo's rings connect neighbours: of four ranks, one is no neighbour of the rank
    # that aborts.
    aborter = """
    import threading
    def give_up():
        wait("abort")
        rankscope.torch.abort(group="default_pg", reason="rank 0 gives up")
    if rank == 0:
        threading.Thread(target=give_up, daemon=True).start()
    assert rankscope.torch._publication.joined.wait(60)
    """
    absent = 1 + arrival
    code = TRAIN.replace("rank == 1", f"rank == {absent}")
    code = code.replace("    if", '    note(f"ready.{rank}")\n    if')
    with Torchrun(4, _unindented(aborter) + code + RUN, tmp_path) as script:
        for rank in range(4):
            script.read(f"ready.{rank}")
        script.let("abort")
        hung = [rank for rank in range(4) if rank != absent]
        errors = [script.read(f"error.{rank}") for rank in hung]
        script.let("go")
        errors.append(script.read(f"error.{absent}"))
        for error in errors:
            assert "DistAbortedError" in error, error
            assert "rank 0 gives up" in error
            assert "by rank 0" in error
        assert script.finish() != 0


def _unindented(text: str) -> str:
    return "\n".join(one.removeprefix("    ") for one in text.splitlines()) + "\n"


def test_a_notebook_that_goes_away_does_not_disturb_the_script(tmp_path: Path) -> None:
    code = """
    x = torch.ones(4)
    while not (folder / "go").exists():
        dist.all_reduce(x)
        done = torch.tensor(float((folder / "go").exists()))
        dist.all_reduce(done)
        if done: break
    """
    code = code.replace('while not (folder / "go").exists()', "while True")
    notebook = (
        "import os, sys, time\nfrom rankscope.engines import Job\n"
        "job = Job.attach(*sys.argv[1:])\n"
        "job.subscribe(lambda rank, summary: seen.add(rank))\n"
        "seen = set()\n"
        "while len(seen) < 2: time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with Torchrun(2, code, tmp_path) as script:
        address, key = script.printed()
        assert key is not None
        for _ in range(2):
            gone = subprocess.run(
                [sys.executable, "-c", notebook, address, key],
                timeout=DEADLINE,
                check=False,
            )
            assert gone.returncode == -signal.SIGKILL
        with script.attach() as job:
            changed = threading.Event()
            job.subscribe(lambda rank, summary: changed.set())
            assert changed.wait(DEADLINE)
        script.let("go")
        assert script.finish() == 0, script.output


def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    with Torchrun(2, HANG, tmp_path) as script, script.attach() as job:
        until(lambda: waiting(job, 0), script)
        os.kill(job.status().ranks[1].pid, signal.SIGKILL)
        assert script.finish() != 0
        until(lambda: job.closed)
        assert job.ended is not None
        assert "the job has ended" in job.ended


def test_the_module_runs_a_script_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 42\n")
    code = """
    import beside
    if rank == 0:
        note("seen", repr((sys.argv[1:], __name__, Path(__file__).name, beside.value)))
    x = torch.ones(2)
    dist.all_reduce(x)
    wait("go")
    sys.exit(3)
    """
    with Torchrun(
        2,
        code,
        tmp_path,
        begin="",
        module="rankscope.torch",
        options=("--allow-abort", "--"),
        arguments=("--port", "none", "-m"),
    ) as script:
        with script.attach() as job:
            assert job.allow_abort
            assert job.launcher == "train.py"
            until(lambda: len(job.status(fresh=True).group_keys) == 1, script)
            seen = script.read("seen")
            assert seen == str((["--port", "none", "-m"], "__main__", "train.py", 42))
            script.let("go")
            assert script.finish() != 0
        assert "exitcode  : 3" in script.output
