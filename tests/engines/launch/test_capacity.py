"""More ranks than the machine can hold are refused before one is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankscope.engines import Cluster, ClusterStartError
from rankscope.engines.launch import clusters, preconditions


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, and 24 GB of free memory."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(preconditions, "free_memory", lambda: 24 * 10**9)


def test_64_ranks_on_2_cores_pass() -> None:
    preconditions.check_capacity(64)


def test_too_many_for_the_cores() -> None:
    with pytest.raises(ClusterStartError) as caught:
        preconditions.check_capacity(65)
    said = str(caught.value)
    assert "65 ranks are too many for this machine" in said
    assert "of the 2 cores" in said
    assert "memory" not in said
    assert "at most 64, or all of them with --force" in said


def test_too_many_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditions, "free_memory", lambda: 10**9)
    with pytest.raises(ClusterStartError) as caught:
        preconditions.check_capacity(20)
    said = str(caught.value)
    assert "they need 1.2 GB of memory (60 MB each), and 1.0 GB are free" in said
    assert "cores" not in said
    assert "at most 16" in said


class Prepared(Exception):
    """The start went on past the check."""


@pytest.mark.processes
def test_no_process_is_started_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*args: object, **options: object) -> None:
        raise Prepared

    monkeypatch.setattr(clusters, "prepare", prepare)
    monkeypatch.setattr(preconditions, "check_backend", lambda n, backend: None)
    with pytest.raises(ClusterStartError, match="1000 ranks are too many"):
        Cluster(1000)
    with pytest.raises(Prepared):
        Cluster(1000, force=True)
    # Other machines are not this one.
    with pytest.raises(Prepared):
        Cluster(1000, engines="ssh")


def test_the_limit_of_a_container_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    whole = preconditions.free_memory()
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/one\n")
    folder = tmp_path / "pod" / "one"
    folder.mkdir(parents=True)
    monkeypatch.setattr(preconditions, "_CGROUP", own)
    monkeypatch.setattr(preconditions, "_CGROUPS", tmp_path)
    # Without files: the root of all groups.
    assert preconditions.free_memory() == pytest.approx(whole, rel=0.5)
    (folder / "memory.current").write_text("70000000\n")
    (folder / "memory.stat").write_text("anon 40000000\ninactive_file 30000000\n")
    (folder / "memory.max").write_text("100000000\n")
    assert preconditions.free_memory() == 60_000_000
    (folder / "memory.max").write_text("max\n")
    assert preconditions.free_memory() == pytest.approx(whole, rel=0.5)
