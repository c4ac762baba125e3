"""Jobs in a table of processes: which processes are ranks, and which are meant."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from rankscope.backends.attach.jobs import (
    Job,
    Member,
    find_jobs,
    jobs_of_user,
    processes_named,
)
from rankscope.backends.attach.launchers import launcher_of, module_of, stated_rank
from rankscope.backends.attach.look import Look
from rankscope.backends.attach.process_table import Process, read_table
from rankscope.backends.attach.stacks import Stack
from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.evidence import SourceLine, combine
from rankscope.backends.post_mortem.report import Report

PYTHON = "/env/bin/python3.12"


def torch_rank(rank: int, size: int = 2, port: int = 29500) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
    }


def mpi_rank(rank: int, size: int = 2) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "PMIX_NAMESPACE": "prterun-host-7@1",
    }


def slurm_rank(rank: int, size: int = 2) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
    }


def table(*processes: Process) -> dict[int, Process]:
    return {one.pid: one for one in processes}


def process(
    pid: int,
    parent: int,
    *command: str,
    variables: Mapping[str, str] = {},
    **facts: Any,
) -> Process:
    return Process(
        pid, parent, command, program=command[0], variables=variables, **facts
    )


def ranks(job: Job) -> dict[int | None, int]:
    return {one.rank: one.process.pid for one in job.members}


TORCHRUN = (
    process(10, 1, "/bin/bash"),
    process(11, 10, PYTHON, "/env/bin/torchrun", "--nproc-per-node", "2", "train.py"),
    process(12, 11, PYTHON, "-u", "train.py", variables=torch_rank(0)),
    process(13, 11, PYTHON, "-u", "train.py", variables=torch_rank(1)),
    # A worker of rank 1's data loader, and the tracker of its semaphores.
    process(14, 13, PYTHON, "-u", "train.py", variables=torch_rank(1)),
    process(15, 13, PYTHON, "-c", "tracker", variables=torch_rank(1)),
)


def test_the_ranks_of_torchrun() -> None:
    (job,) = find_jobs(table(*TORCHRUN))
    assert (job.launcher, job.pid, job.id) == ("torchrun", 11, "127.0.0.1:29500")
    assert ranks(job) == {0: 12, 1: 13}
    assert job.world_size == 2
    assert job.command == (PYTHON, "-u", "train.py")


def test_two_jobs_of_one_user_are_two() -> None:
    other = [
        process(21, 10, PYTHON, "-m", "torch.distributed.run", "b.py"),
        process(22, 21, PYTHON, "b.py", variables=torch_rank(0, port=29501)),
    ]
    found = find_jobs(table(*TORCHRUN, *other))
    assert sorted((job.pid, len(job.members)) for job in found) == [(11, 2), (21, 1)]


def test_a_shell_below_the_launcher_is_no_rank() -> None:
    (job,) = find_jobs(
        table(
            process(1, 0, "/usr/bin/mpirun", "-n", "2", "run.sh"),
            process(2, 1, "/bin/bash", "run.sh", variables=mpi_rank(0)),
            process(3, 2, PYTHON, "train.py", variables=mpi_rank(0)),
            process(4, 1, "/bin/bash", "run.sh", variables=mpi_rank(1)),
            process(5, 4, PYTHON, "train.py", variables=mpi_rank(1)),
        )
    )
    assert (job.launcher, job.pid, job.id) == ("mpiexec", 1, "prterun-host-7@1")
    assert ranks(job) == {0: 3, 1: 5}


def test_the_ranks_of_mpich_belong_to_their_mpiexec() -> None:
    processes = []
    for base in (100, 200):
        processes += [
            process(base, 1, "mpiexec", "-n", "1", "python", "a.py"),
            process(base + 1, base, "hydra_pmi_proxy", "--rank", "0"),
            process(
                base + 2,
                base + 1,
                PYTHON,
                "a.py",
                variables={"PMI_RANK": "0", "PMI_SIZE": "1"},
            ),
        ]
    found = find_jobs(table(*processes))
    assert sorted(job.pid or 0 for job in found) == [100, 200]


def test_torchrun_in_a_step_of_slurm() -> None:
    """Both have variables for ranks: those of the innermost launcher count."""
    (job,) = find_jobs(
        table(
            Process(1, 0, ("slurmstepd: [1234.0]",)),
            process(2, 1, PYTHON, "/bin/torchrun", "a.py", variables=slurm_rank(0)),
            process(3, 2, PYTHON, "a.py", variables=slurm_rank(0) | torch_rank(0)),
            process(4, 2, PYTHON, "a.py", variables=slurm_rank(0) | torch_rank(1)),
        )
    )
    assert (job.launcher, job.pid) == ("torchrun", 2)
    assert ranks(job) == {0: 3, 1: 4}


def test_a_step_of_slurm() -> None:
    (job,) = find_jobs(
        table(
            Process(1, 0, ("slurmstepd: [1234.0]",)),
            process(2, 1, PYTHON, "a.py", variables=slurm_rank(5, 8)),
            process(3, 1, "/opt/conda/bin/python", "/opt/conda/bin/conda", "run"),
        )
    )
    assert (job.launcher, job.pid, job.id) == ("srun", 1, "1234.0")
    assert (ranks(job), job.world_size) == ({5: 2}, 8)


def test_a_shell_in_an_allocation_is_no_job() -> None:
    assert find_jobs(table(process(2, 1, PYTHON, variables=slurm_rank(0, 1)))) == []


def test_ranks_without_a_launcher() -> None:
    variables = {**torch_rank(0), "TORCHELASTIC_RUN_ID": ""}
    (job,) = find_jobs(table(process(2, 1, PYTHON, "a.py", variables=variables)))
    assert (job.launcher, job.pid, job.id) == ("", None, "127.0.0.1:29500")


def test_two_processes_with_one_rank() -> None:
    (job,) = find_jobs(
        table(
            process(5, 1, PYTHON, "a.py", variables=torch_rank(0), started=2.0),
            process(6, 1, PYTHON, "a.py", variables=torch_rank(0), started=1.0),
        )
    )
    assert ranks(job) == {0: 6}
    assert "process 5 says that it is rank 0, as process 6 does" in job.notes[0]


def test_engines_and_children_of_multiprocessing_have_no_rank() -> None:
    found = find_jobs(
        table(
            process(2, 1, PYTHON, "-m", "ipyparallel.engine", "--id=0"),
            process(3, 1, PYTHON, "-m", "ipyparallel.engine", "--id=1"),
            process(4, 1, PYTHON, "nb.py", started=3.0),
            process(5, 4, PYTHON, "nb.py"),
            process(6, 4, PYTHON, "-c", "spawn_main(…)", "--multiprocessing-fork"),
            process(7, 4, PYTHON, "-c", "from multiprocessing.resource_tracker …"),
        )
    )
    kinds = {job.launcher: [one.process.pid for one in job.members] for job in found}
    assert kinds == {"ipyparallel": [2, 3], "multiprocessing": [5, 6]}
    assert found[1].command == (PYTHON, "nb.py")
    assert {one.rank for job in found for one in job.members} == {None}


@pytest.mark.parametrize("value", ["", "-1", "x", "١", "1" * 20])
def test_what_is_no_rank_is_none(value: str) -> None:
    assert stated_rank({**torch_rank(0), "RANK": value}) is None


@pytest.mark.parametrize(
    ("command", "module", "launcher"),
    [
        ((PYTHON, "/env/bin/torchrun", "x.py"), "torchrun", "torchrun"),
        ((PYTHON, "-m", "torch.distributed.run"), "torch.distributed.run", "torchrun"),
        ((PYTHON, "-X", "dev", "-u", "a/train.py", "-m"), "train.py", ""),
        ((PYTHON, "-c", "import torchrun"), "", ""),
        ((PYTHON,), "", ""),
        (("/opt/openmpi/bin/prterun", "-n"), "prterun", "mpiexec"),
        (("python3.13t", "/bin/accelerate", "launch"), "accelerate", "accelerate"),
        (("/usr/bin/pythonic", "x.py"), "pythonic", ""),
        ((), "", ""),
    ],
)
def test_names_of_commands(
    command: tuple[str, ...], module: str, launcher: str
) -> None:
    assert module_of(command) == module
    assert launcher_of(command) == launcher


# -- what a person names ---------------------------------------------------------


def test_a_launcher_or_its_shell_means_its_ranks() -> None:
    for pid in (10, 11):
        (job,), problems = processes_named([pid], table(*TORCHRUN), list)
        assert (ranks(job), problems) == ({0: 12, 1: 13}, [])


def test_the_pid_of_a_rank_means_it_alone() -> None:
    (job,), problems = processes_named([13, 13], table(*TORCHRUN), list)
    assert (ranks(job), job.world_size, problems) == ({1: 13}, 2, [])


def test_a_worker_of_a_rank_is_a_process_without_a_rank() -> None:
    (job,), _ = processes_named([14], table(*TORCHRUN), list)
    assert (ranks(job), job.launcher) == ({None: 14}, "")


def test_children_that_are_no_ranks_leave_what_was_named() -> None:
    pool = table(
        process(4, 1, PYTHON, "pool.py"),
        process(5, 4, PYTHON, "pool.py"),
        process(6, 4, PYTHON, "pool.py"),
    )
    for pids in ([4], [5], [4, 6]):
        (job,), problems = processes_named(pids, pool, lambda found: [])
        assert [one.process.pid for one in job.members] == pids
        assert problems == []
    (job,), _ = processes_named([4], pool, list)
    assert [one.process.pid for one in job.members] == [5, 6]


def test_what_cannot_be_meant_is_told() -> None:
    others = [
        process(30, 1, "/usr/bin/sleep", "9"),
        process(31, 1, "/usr/bin/mpiexec", "-n", "2", "a.out"),
    ]
    everything = table(*TORCHRUN, *others)
    found, problems = processes_named([30, 31, 99], everything, list)
    assert found == []
    assert problems == [
        "process 30 (sleep) is no Python",
        "process 31 (mpiexec) has started no Python on this host",
        "there is no process 99",
    ]


def test_jobs_of_other_users_are_for_root() -> None:
    found = table(
        process(2, 1, PYTHON, "a.py", variables=torch_rank(0), user=1000),
        process(3, 1, PYTHON, "b.py", variables=torch_rank(0, port=1), user=1001),
    )
    assert [ranks(job) for job in jobs_of_user(found, 1001)] == [{0: 3}]
    assert len(jobs_of_user(found, 0)) == 2


def test_processes_without_a_rank_are_told_once_where_they_are_in_one_place() -> None:
    members = [Member(process(pid, 1, PYTHON)) for pid in (4, 5, 6, 8, 9)]
    job = Job("ipyparallel", "", 1, None, tuple(members))
    waiting = Stack(SourceLine("train.py", 7), "`wait` of threading.py")
    stacks = {pid: waiting for pid in (4, 5, 8)} | {6: Stack(), 9: Stack(problem="no")}
    report = Report((), (), combine([]))
    assert Look(job, stacks, report).as_text().splitlines()[-4:-1] == [
        "  processes 4–5, 8 are at train.py:7 in `wait` of threading.py",
        "  process 6 runs no line of a program",
        "  process 9 cannot be read: no",
    ]


@pytest.mark.processes
def test_a_process_that_has_ended_is_none_that_runs() -> None:
    with subprocess.Popen(["true"]) as child:
        assert until(lambda: psutil.Process(child.pid).status() == "zombie", 20)
        assert child.pid not in read_table()
