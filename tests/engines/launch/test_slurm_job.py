"""Jobs of Slurm: what is submitted, what Slurm says of them, where ranks go."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from typing import Any

import pytest

from rankscope.engines import Cluster, ClusterError, ClusterStartError
from rankscope.engines.launch.slurm import (
    JobInfo,
    SlurmJob,
    slurm_environment,
    span_text,
    submission,
)
from rankscope.engines.launch.slurm_hosts import SlurmHosts, place

#: A line of ``scontrol show job -o`` of Slurm 22.05, shortened.
LINE = (
    "JobId=21 JobName=a UserId=me(1000) JobState=RUNNING Reason=None "
    "Requeue=1 TimeLimit=01:00:00 StartTime=2026-11-26T03:47:26 "
    "EndTime=2026-11-26T04:47:26 NodeList=host-[a-b] BatchHost=host-a NumNodes=2 "
    "NumTasks=8 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=8,node=2,billing=8"
)
STEP = "slurmstepd-b: error: *** STEP 4.1 ON b CANCELLED AT 2026-11-26T03:49:55"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Slurm's programs are there, and this process is in no job."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return monkeypatch


def test_a_job_is_submitted_with_the_options_of_a_person() -> None:
    command = submission("-p gpu -N 2 --gpus-per-node=8 -t 1:00:00")
    assert command[:2] == ["salloc", "--job-name=rankscope"]
    assert command[2:-3] == [
        "-p",
        "gpu",
        "-N",
        "2",
        "--gpus-per-node=8",
        "-t",
        "1:00:00",
    ]
    assert command[-3:-1] == ["sh", "-c"]
    assert submission("-J mine")[:3] == ["salloc", "-J", "mine"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("-N 2 hostname", "'hostname' is no option of salloc"),
        ("bash", "'bash' is no option of salloc"),
        ("--no-shell", "--no-shell does not go with ranks"),
        ("--array=1-3", "--array does not go with ranks"),
        ("-N 1 : -N 2", "the parts of a heterogeneous job share no ranks"),
        ("-N", "-N needs a value; all options are within one pair of quotes"),
        ("-J 'mine", "No closing quotation"),
    ],
)
def test_what_is_no_option_is_refused(options: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        submission(options)


def test_what_slurm_says_of_a_job() -> None:
    found = JobInfo.parse(LINE)
    assert found == JobInfo(
        "RUNNING",
        "",
        "host-[a-b]",
        8,
        datetime(2026, 11, 26, 3, 47, 26).timestamp(),
        datetime(2026, 11, 26, 4, 47, 26).timestamp(),
    )
    assert found.alive
    waits = JobInfo.parse(
        "JobState=PENDING Reason=Priority EndTime=Unknown NodeList=(null) NumTasks=N/A"
    )
    assert waits == JobInfo("PENDING", "Priority")
    assert waits.alive


@pytest.mark.parametrize(
    ("state", "reason", "said", "why"),
    [
        ("COMPLETING", "TimeLimit", "", "time limit"),
        ("TIMEOUT", "TimeLimit", "", "time limit"),
        ("COMPLETING", "NodeDown", "", "node failure"),
        ("COMPLETING", "", f"{STEP} ***", "cancelled, as by scancel"),
        ("COMPLETING", "", f"{STEP} DUE TO TIME LIMIT ***", "time limit"),
        ("COMPLETING", "", f"{STEP} DUE TO NODE FAILURE, SEE LOG ***", "node failure"),
        ("COMPLETING", "", f"{STEP} DUE TO PREEMPTION ***", "preempted by another job"),
        ("PREEMPTED", "", f"{STEP} ***", "preempted by another job"),
        ("CANCELLED", "Resources", "", "cancelled, as by scancel"),
        ("COMPLETING", "Mystery", "", "Slurm says COMPLETING, Mystery"),
    ],
)
def test_why_a_job_has_ended(state: str, reason: str, said: str, why: str) -> None:
    found = JobInfo(state, reason)
    assert not found.alive
    assert found.why_ended(said) == why


@pytest.mark.parametrize(
    ("gpus", "n", "tasks", "placed"),
    [
        # As many as there are tasks, if there are more than one on each node.
        ({"a": 8, "b": 8}, None, 4, {"a": 2, "b": 2}),
        ({"a": 8, "b": 8}, None, 2, {"a": 8, "b": 8}),
        ({"a": 0, "b": 4}, None, None, {"a": 1, "b": 4}),
        ({"a": 8, "b": 8}, 5, 16, {"a": 3, "b": 2}),
        ({"a": 0}, 3, 1, {"a": 3}),
    ],
)
def test_where_ranks_go(
    gpus: dict[str, int], n: int | None, tasks: int | None, placed: dict[str, int]
) -> None:
    assert place(gpus, n, tasks) == placed


def test_each_node_has_a_rank() -> None:
    with pytest.raises(ClusterStartError, match="^-n 1: the job has 2 nodes"):
        place({"a": 0, "b": 0}, 1)


def test_a_step_takes_the_whole_node(installed: pytest.MonkeyPatch) -> None:
    """Whatever the options of the job's tasks, in which it may run, were."""
    installed.setenv("SLURM_JOB_ID", "21")
    installed.setenv("SLURM_CPUS_PER_TASK", "1")
    installed.setenv("SLURM_CONF", "/etc/slurm.conf")
    hosts = SlurmHosts(SlurmJob(True), python="/env/bin/python")
    command = hosts.command("b")
    assert command[0] == "srun"
    assert {"--jobid=21", "--nodelist=b", "--overlap", "--ntasks=1"} <= {*command}
    assert command[-4:-2] == ["/env/bin/python", "-m"]
    kept = {key for key in slurm_environment() if key.startswith("SLURM_")}
    assert kept == {"SLURM_CONF"}


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"slurm": True}, ClusterError, "slurm: this process is in no job of Slurm"),
        ({"slurm": "-N 2 date"}, ValueError, "slurm='-N 2 date': 'date' is no option"),
        ({"slurm": "-N 2", "n": 0}, ClusterError, "n=0: the number of ranks"),
        ({"slurm": "-N 2", "hosts": "a:2"}, ClusterError, "hosts= and slurm= both"),
        (
            {"slurm": "-N 2", "engines": "mpi"},
            ClusterError,
            "slurm= does not go with the launcher mpi: in a job name its nodes",
        ),
    ],
)
def test_what_does_not_go_with_slurm(
    installed: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: type[Exception],
    why: str,
) -> None:
    with pytest.raises(error, match=f"^{why}"):
        Cluster(**options)


def test_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ClusterError, match="^slurm: there is no salloc on this host"):
        Cluster(slurm="-N 2")


def test_the_end_of_a_job_is_told_in_time(installed: pytest.MonkeyPatch) -> None:
    """Twice, and once where both times have passed."""
    installed.setenv("SLURM_JOB_ID", "21")
    job = SlurmJob(True)
    assert (job.text, job.warning()) == ("Slurm's job 21", "")
    job.info = JobInfo("RUNNING", end=time.time() + 4810)
    assert (job.text, job.warning()) == ("Slurm's job 21: 1 h 20 min left", "")
    end = datetime.now() + timedelta(seconds=490)
    job.info = JobInfo("RUNNING", end=end.timestamp())
    warning = job.warning()
    assert warning.startswith("Slurm's job 21 ends in 8 min, at ")
    assert f"{end:%H:%M}, and all its ranks" in warning
    assert job.warning() == ""
    job.info = JobInfo("RUNNING", end=time.time() + 42.5)
    assert job.warning().startswith("Slurm's job 21 ends in 42 s")
    assert job.warning() == ""
    job.info = JobInfo("SUSPENDED", end=time.time() + 42.5)
    assert job.text == (
        "Slurm's job 21 is suspended: its ranks stand still until it resumes"
    )


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("Resources", "Resources"),
        ("", "no reason yet"),
        (
            "PartitionNodeLimit",
            "PartitionNodeLimit, its partition allows, or has up, fewer nodes",
        ),
    ],
)
def test_why_a_job_is_pending(
    reason: str, told: str, installed: pytest.MonkeyPatch
) -> None:
    installed.setenv("SLURM_JOB_ID", "21")
    job = SlurmJob(True)
    job.info, job._asked = JobInfo("PENDING", reason), time.monotonic()
    said = asyncio.run(job.pending())
    assert said == f"job 21 is pending for 0 s: {told} (an interrupt cancels it)"


def test_spans_of_time() -> None:
    texts = [span_text(seconds) for seconds in (-1, 3.9, 119, 120, 3599, 7300)]
    assert texts == ["0 s", "3 s", "119 s", "2 min", "59 min", "2 h 1 min"]
