"""What the environment says of reports: where, when, and of which job."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankscope.backends.hang_report.place import Place
from rankscope.backends.hang_report.settings import (
    AFTER,
    RANK,
    Settings,
    facts_of,
    job_key,
    job_name,
)
from rankscope.backends.launch_variables import first_number

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_0/1/error.json",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def test_where_and_when() -> None:
    settings = Settings.of({})
    assert settings.folder == Path.cwd() / "rankscope-report"
    assert settings.after == AFTER
    assert Settings.of({"RANKSCOPE_REPORT": "/shared/x"}).folder == Path("/shared/x")
    assert Settings.of({"RANKSCOPE_REPORT_AFTER": "30.5"}).after == 30.5


@pytest.mark.parametrize("value", ["0", "off", "False", "no"])
def test_off(value: str) -> None:
    assert Settings.of({"RANKSCOPE_REPORT": value}).folder is None


@pytest.mark.parametrize("value", ["soon", "-1", "0", "1.9", "inf", "nan"])
def test_a_number_of_seconds_that_is_none(value: str) -> None:
    with pytest.raises(ValueError, match="RANKSCOPE_REPORT_AFTER"):
        Settings.of({"RANKSCOPE_REPORT_AFTER": value})


def test_ranks_of_a_job_have_one_key_whatever_started_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = TORCHRUN | {
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_0/0/error.json",
        "RANK": "0",
    }
    # A shell may be between the launcher and each rank.
    assert job_key(1, TORCHRUN) == job_key(2, other)
    again = TORCHRUN | {
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_1/1/error.json"
    }
    assert job_key(1, TORCHRUN) != job_key(1, again)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert job_key(5, slurm) == job_key(6, dict(slurm))
    assert job_key(5, {}) == job_key(5, {"HOME": "/x"})
    assert job_key(5, {}) != job_key(6, {})
    # Hosts may share the folder, and a pid is one of its host.
    here = job_key(5, slurm)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="elsewhere"))
    assert job_key(5, slurm) != here
    assert job_key(5, slurm) != job_key(5, slurm | {"SLURM_STEP_ID": "1"})


def test_a_rank_of_torchrun_is_one_wherever_its_script_meets_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for env, same in (TORCHRUN, True), ({"MASTER_PORT": "1"}, False):
        for name in TORCHRUN:
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        place = Place()
        before = place.key
        monkeypatch.setenv("MASTER_PORT", "29999")
        assert (place.key == before) is same


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (TORCHRUN, "node1-29500"),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "exp/7 b"}, "exp-7-b"),
        (
            {"TORCHELASTIC_RUN_ID": "09a84340-ec78-4a71-a61a-a02631da926b"},
            "09a84340",
        ),
        ({"SLURM_JOB_ID": "4711", "MASTER_PORT": "1"}, "slurm-4711"),
        ({"TORCHELASTIC_RUN_ID": "../.."}, "job"),
        ({}, "job"),
    ],
)
def test_the_name_of_a_job_is_part_of_a_path(env: dict[str, str], name: str) -> None:
    assert job_name(env) == name


def test_no_variable_is_shown_that_may_be_a_secret() -> None:
    env = {"RANK": "3", "HF_TOKEN": "hunter2", "RANKSCOPE_KEY": "k", "NCCL_DEBUG": "X"}
    assert facts_of(env) == {"RANK": "3", "NCCL_DEBUG": "X"}
    assert len(facts_of({"MASTER_ADDR": "x" * 9999})["MASTER_ADDR"]) == 200


def test_the_rank_of_any_launcher() -> None:
    assert first_number(RANK, {"OMPI_COMM_WORLD_RANK": "2"}) == 2
    assert first_number(RANK, {"RANK": "x", "PMI_RANK": "1"}) == 1
    assert first_number(RANK, {}) is None
