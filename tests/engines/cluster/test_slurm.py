"""``slurm=``: ranks on the nodes of a job, with the daemons of a real Slurm."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.engines.cluster import slurm_jobs, two_hosts
from tests.engines.cluster.test_ssh_hosts import PLACES

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(520)]


@pytest.fixture(scope="module")
def seen(
    _module_leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the program saw at each step; it runs once."""
    if why := slurm_jobs.why_not():
        pytest.skip(why)
    steps = two_hosts.steps_of(
        slurm_jobs.__file__,
        tmp_path_factory.mktemp("slurm"),
        timeout=500,
    )
    return {one["step"]: one for one in steps}


def test_ranks_are_in_the_order_of_their_nodes(seen: dict[str, Any]) -> None:
    """As many as the job has tasks; else as GPUs; else in blocks."""
    assert seen["places"]["ranks"] == seen["placed"]["gpus"] == PLACES
    blocks = [place[:4] for place in seen["placed"]["blocks"].values()]
    assert blocks == [
        ["host-a", "0", "0", "2"],
        ["host-a", "1", "1", "2"],
        ["host-b", "2", "0", "1"],
    ]


def test_what_listens_is_what_the_table_has(seen: dict[str, Any]) -> None:
    """Beside the daemons salloc, whose socket its command inherits, and srun."""
    found, here = seen["listening"], two_hosts.HERE
    ours = [one for one in found["reached here"] if one[0] == here]
    assert ours == [[here, "controller"], [here, "rank 0"]]
    others = {owner for address, owner in found["reached here"] if address != here}
    assert others - {"salloc", "cat"} == {"slurmctld", "slurmd", "srun"}
    assert {owner for _, owner in found["reached there"]} == {"slurmd"}
    apart = [one for one in found["there"] if one[1] != "slurmd"]
    assert {address for address, _ in apart} <= {"127.0.0.1"}


def test_the_time_that_is_left_is_shown(seen: dict[str, Any]) -> None:
    assert seen["left"]["text"].startswith("Slurm's job ")
    assert seen["left"]["text"].endswith(": 9 min left")
    assert f" · {seen['left']['text']} · " in seen["left"]["status"]


def test_a_restart_is_on_the_own_node_in_the_same_job(seen: dict[str, Any]) -> None:
    """What kills one rank is not the end of the job."""
    assert seen["restart"]["reason"].startswith("rank 3 is dead: killed by SIGKILL (")
    assert seen["restart"]["ranks"] == PLACES
    assert seen["restart"]["same"]


def test_a_pending_job_says_why_and_an_interrupt_cancels_it(
    seen: dict[str, Any],
) -> None:
    """The program looked that nothing stays, and that a job's turn comes."""
    assert seen["pending"]["interrupted"]
    assert " is pending for " in seen["pending"]["progress"][-1]
    assert ": Resources" in seen["pending"]["progress"][-1]


def test_a_notebook_in_a_job_takes_its_nodes(seen: dict[str, Any]) -> None:
    """And leaves it when its ranks end."""
    job, ranks, after = seen["inside"]["said"][:3]
    assert ranks == f"{job} host-a host-a host-b host-b"
    assert after == f"{job} RUNNING"


def test_mpiexec_starts_ranks_on_the_nodes_of_a_job(seen: dict[str, Any]) -> None:
    """By srun: no sshd runs there."""
    said = seen["inside"]["said"]
    assert said[said.index("mpi") + 1] == "host-a host-a host-b host-b"


@pytest.mark.parametrize("kind", ["script", "torch"])
def test_a_script_under_srun_needs_no_variables(
    seen: dict[str, Any], kind: str
) -> None:
    """Nor with ``-m rankscope.torch``."""
    if kind == "torch" and not seen["inside"]["torch"]:
        pytest.skip("needs .venv-torch: make torch-environment")
    said = seen["inside"]["said"]
    at = said.index(kind) + 1
    assert sorted(said[at : at + 4]) == [
        "host-a 0 0 4",
        "host-a 1 1 4",
        "host-b 2 0 4",
        "host-b 3 1 4",
    ]


def test_why_a_step_hangs_is_found_from_its_processes(seen: dict[str, Any]) -> None:
    step = seen["hanging"]
    assert (step["launcher"], step["ranks"][:2]) == ("srun", [0, 1])
    ((culprits, text),) = step["verdicts"]
    assert culprits == [1]
    assert text.startswith("rank 1 has not entered all_reduce #2 (hangs.py:9): it is")


def test_the_last_rank_of_both_hosts_says_who_was_late(seen: dict[str, Any]) -> None:
    """Once, for ranks that share no folder."""
    (said,) = seen["late"]["said"]
    who = "rankscope: late rank: rank 2 is last to enter all_reduce at late.py:"
    assert said.startswith(who)
    assert " (the clocks of the hosts agree within " in said


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("partition", "invalid partition specified: nowhere"),
        ("option", "salloc: unrecognized option '--nodez'"),
        ("ranks", "-n 1: the job has 2 nodes, and each has a rank at least"),
        ("python", "host-b: there is no /nowhere/python there: name the Python that"),
        ("rankscope", "has no rankscope: install Rankscope"),
        ("no job", "this process is in no job of Slurm (no SLURM_JOB_ID)"),
    ],
)
def test_what_cannot_work_is_an_error(
    seen: dict[str, Any], what: str, words: str
) -> None:
    """Slurm's own words where it is Slurm that refuses; nothing stays of the start."""
    assert words in seen["refused"]["said"][what]


def test_the_time_limit_is_named_as_the_cause(seen: dict[str, Any]) -> None:
    why = f"Slurm's job {seen['limit']['job']} ended: time limit"
    assert seen["limit"]["said"] == repr(f"rank 0 is dead: {why}")


@pytest.mark.parametrize(
    ("what", "words"),
    [("scancel", "cancelled, as by scancel"), ("node", "node failure")],
)
def test_the_end_of_the_job_is_the_cause_of_the_ends_of_ranks(
    seen: dict[str, Any], what: str, words: str
) -> None:
    found = seen["ended"]["said"][what]
    why = f"Slurm's job {found['job']} ended: {words}"
    assert found["reasons"] == [f"rank {rank} is dead: {why}" for rank in range(2)]
    assert found["text"] == why
    assert why in found["errors"][0]
    another = f"{why}: %dist_init --replace --slurm … starts another"
    assert found["again"] == [another] * 2
    assert found["board"].endswith(f"Rank 1 is dead: {why}.")


def test_a_notebook_that_has_attached_names_the_end_of_the_job(
    seen: dict[str, Any],
) -> None:
    why = r"rank 0 is dead: Slurm's job \d+ ended: cancelled, as by scancel"
    assert re.fullmatch(why, seen["ended"]["attached"])


def test_the_ranks_of_a_kept_job_are_found_by_its_number(seen: dict[str, Any]) -> None:
    """Where its notebook ran, and on another host, which ends them and the job."""
    kept = seen["kept"]
    assert kept["found"] == {str(rank): rank * 100 for rank in range(4)}
    assert kept["text"].startswith(f"Slurm's job {kept['job']}")
    ranks, left = kept["away"].splitlines()
    assert ranks == "0 1 2 3"
    assert left == f"Slurm's job {kept['job']}: 9 min left"
    why = "no ranks of yours are known in Slurm's job 999; there are ranks in "
    assert kept["unknown"].startswith(f"{why}{kept['job']}. ")


def test_nothing_stays_of_a_kept_job_that_has_ended(seen: dict[str, Any]) -> None:
    """Nor does its controller, on the login node. The program looked."""
    assert seen["abandoned"]["processes"] > 3


def test_the_job_ends_with_a_notebook_that_is_killed(seen: dict[str, Any]) -> None:
    assert seen["killed"]["processes"] == 4
    assert seen["killed"]["seconds"] < 10
