"""Cluster files: what other processes of the user read of the clusters that run."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.engines import ClusterError
from rankscope.engines.launch.cluster_file import (
    Announcement,
    ClusterFile,
    cluster_files,
    file_of_job,
    is_elsewhere,
)
from rankscope.engines.observe.rank_slots import RankSlot

SLOTS = [
    RankSlot(0, 4, "first", 4711, "node1", "10.0.0.1", 29500),
    RankSlot(1, 5, "second", 4712, "node1", "10.0.0.1", 29501),
]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of its own."""
    folder = tmp_path / "runtime"
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def running(tmp_path: Path) -> ClusterFile:
    """A cluster that counts as running: its controller is this process."""
    file = ClusterFile.of("tp", str(tmp_path), os.getpid(), SLOTS, None)
    file.connection_file.parent.mkdir()
    file.connection_file.touch()
    file.write()
    return file


def test_it_is_for_its_user_alone_and_names_the_ranks(running: ClusterFile) -> None:
    assert running.path.stat().st_mode & 0o777 == 0o600
    (found,) = cluster_files()
    assert found.pid == os.getpid()
    hello = found.hellos["second"]
    assert (hello["pid"], hello["port"]) == (4712, 29501)
    assert hello["assignment"] == {"rank": 1, "world_size": 2, "torch": None}
    running.remove()
    assert cluster_files() == []


def test_a_file_of_something_else_is_left_alone(
    running: ClusterFile, runtime: Path
) -> None:
    other = runtime / "rankscope-cluster-x.json"
    for text in ("{", "[]", '{"cluster_id": "x"}'):
        other.write_text(text)
        assert [one.cluster_id for one in cluster_files()] == ["tp"]
    assert other.exists()


def test_the_file_of_a_cluster_that_was_killed_is_deleted(running: ClusterFile) -> None:
    assert running.controller is not None
    pid, started = running.controller
    # The pid was given to another process since.
    killed = replace(running, controller=(pid, started - 1))
    killed.write()
    assert cluster_files() == []
    assert not running.path.exists()
    running.write()
    running.connection_file.unlink()
    assert cluster_files() == []
    assert not running.path.exists()


def test_of_another_host_it_is_not_known_whether_it_runs(running: ClusterFile) -> None:
    assert running.controller is not None
    far = replace(running, node="elsewhere", controller=(running.controller[0], 0))
    far.write()
    # A notebook of this host that has attached to it.
    replace(running, controller=None).write()
    assert [one.node for one in cluster_files()] == [running.node]
    running.path.unlink()
    # The newest is of one that has attached there.
    replace(far, node="third", controller=None, since=far.since + 1).write()
    assert [one.node for one in cluster_files()] == ["elsewhere"]


def test_the_cluster_of_a_job_is_found_by_its_number(running: ClusterFile) -> None:
    with pytest.raises(ClusterError, match="known in Slurm's job 21. Those that"):
        file_of_job("21")
    replace(running, job="21").write()
    assert file_of_job("21").cluster_id == "tp"
    with pytest.raises(ClusterError, match="in Slurm's job 2; there are ranks in 21"):
        file_of_job("2")


def test_processes_of_another_host_are_not_those_of_this_one(
    running: ClusterFile,
) -> None:
    assert not is_elsewhere("tp", running.profile)
    replace(running, node="elsewhere").write()
    # One on each host, as where both have the same id.
    assert not is_elsewhere("tp", running.profile)
    # A notebook of this host that has attached does not know the controller's pid.
    replace(running, controller=None).write()
    assert is_elsewhere("tp", running.profile)
    assert not is_elsewhere("another", running.profile)


def test_the_other_notebook_is_told_that_the_cluster_was_shut_down(
    running: ClusterFile,
) -> None:
    owner = Announcement(running.cluster_id, running.profile)
    owner.update(running)
    # The other one has announced itself since.
    file = ClusterFile.read(running.cluster_id, running.profile)
    assert file is not None
    replace(file, pid=os.getppid(), notebook="other.ipynb").write()
    owner.end("")
    file = ClusterFile.read(running.cluster_id, running.profile)
    assert file is not None
    said = r"the cluster was shut down by .+ at \d\d:\d\d:\d\d: its ranks and "
    assert re.match(said, file.stopped)
    file.remove()


def test_the_other_notebook_is_told_who_restarts_a_rank(running: ClusterFile) -> None:
    ours, other = (Announcement(running.cluster_id, running.profile) for _ in range(2))
    assert ours.find_restart("engine-2") == ""
    ours.update(running)
    other.note_restart(["engine-2"])
    assert re.match("ended by .+ for a restart", ours.find_restart("engine-2"))
    assert ours.find_restart("engine-1") == ""
    # It runs again.
    other.update(running)
    assert ours.find_restart("engine-2") == ""


def test_the_notebook_reads_why_its_cluster_was_stopped(running: ClusterFile) -> None:
    notebook = Announcement(running.cluster_id, running.profile)
    terminal = Announcement(running.cluster_id, running.profile)
    # What an earlier cluster left there is none of this one's.
    terminal.end("stopped before")
    assert notebook.find_end() is None
    notebook.update(running)
    assert notebook.find_end() is None
    terminal.end("stopped from a terminal")
    assert cluster_files() == []
    running.connection_file.unlink()
    # It is kept for the notebook, which lives.
    assert cluster_files() == []
    assert notebook.find_end() == notebook.ended == "stopped from a terminal"
    notebook.end("")
    assert not running.path.exists()
    assert notebook.find_end() == "stopped from a terminal"
    # Nothing is left to end.
    terminal.end("once more")
    assert not running.path.exists()
