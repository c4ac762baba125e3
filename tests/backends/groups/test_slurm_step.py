"""The variables of torchrun, from those of a step of Slurm."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rankscope.backends.slurm_step import (
    fill_environment,
    meeting_step,
    why_port_is_taken,
)

#: Of the last of five tasks on two nodes, as Slurm 22.05 sets them.
STEP = {
    "SLURM_JOB_ID": "21",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "node[07,09-11]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
}


def test_a_task_of_a_step_has_its_place() -> None:
    env = dict(STEP)
    fill_environment(env)
    assert {name: env[name] for name in env.keys() - STEP} == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": str(20_000 + 31 * 21 + 3),
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a,b", "a"),
        ("n[1-2],m3", "n1"),
        ("n[5],m3", "n5"),
        ("rack[1-2]node[03,07-09],login", "rack1node03"),
        ("gpu-a-[001-128]", "gpu-a-001"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    env = {**STEP, "SLURM_STEP_NODELIST": nodes}
    fill_environment(env)
    assert env["MASTER_ADDR"] == first


def test_the_node_of_rank_0_is_the_first_of_the_hostfile(tmp_path: Path) -> None:
    """Of ``-m arbitrary``; in the list of the step the nodes are sorted."""
    (tmp_path / "hosts").write_text("node11\nnode07\nnode11\n")
    env = {
        **STEP,
        "SLURM_DISTRIBUTION": "arbitrary",
        "SLURM_HOSTFILE": str(tmp_path / "hosts"),
    }
    fill_environment(env)
    assert env["MASTER_ADDR"] == "node11"


def test_nodes_with_as_many_tasks_and_one_node() -> None:
    env = {**STEP, "SLURM_NODEID": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x3),7"}
    fill_environment(env)
    assert env["LOCAL_WORLD_SIZE"] == "7"
    env = {**STEP, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "5"}
    fill_environment(env)
    assert env["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": ""},
        # The batch script of a job, and its shell.
        {"SLURM_STEP_ID": "4294967291"},
        {"SLURM_STEP_ID": "4294967290"},
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_STEP_TASKS_PER_NODE": "two"},
        {"SLURM_STEP_NODELIST": ""},
        {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": "/not/there"},
    ],
)
def test_what_is_no_step_or_has_variables_is_left_alone(
    changed: dict[str, str],
) -> None:
    env = {**STEP, **changed}
    before = dict(env)
    fill_environment(env)
    assert env == before


def test_an_address_that_the_batch_script_has_set_is_kept() -> None:
    own = {"MASTER_ADDR": "node07-ib", "MASTER_PORT": "29500", "WORLD_SIZE": "5"}
    env = {**STEP, **own}
    fill_environment(env)
    assert own.items() <= env.items()
    assert (env["RANK"], env["LOCAL_RANK"]) == ("4", "1")
    assert not meeting_step(env)


def test_a_port_that_is_of_the_step_alone() -> None:
    env = dict(STEP)
    assert not meeting_step(env)
    fill_environment(env)
    assert meeting_step(env) == "21.3"
    assert not meeting_step({**env, "MASTER_PORT": "29500"})
    assert not meeting_step({"MASTER_PORT": env["MASTER_PORT"]})


def test_a_port_that_another_step_has_is_named() -> None:
    """By rank 0, which is to listen there; of a port that was set nothing is said."""
    env = {**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    fill_environment(env)
    with socket.create_server(("", int(env["MASTER_PORT"]))):
        why = why_port_is_taken(env)
        assert why_port_is_taken({**env, "RANK": "1"}) == ""
        assert why_port_is_taken({**env, "SLURM_STEP_ID": "4"}) == ""
    assert why.startswith(f"port {env['MASTER_PORT']} of ")
    assert "Slurm's step 21.3 are to meet, is taken (Address already in use)" in why
    assert why_port_is_taken(env) == ""
