"""Which launcher starts the engines: a backend registers the one that it needs."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from rankscope.backends import Backend, BackendConfig
from rankscope.backends.interface.registry import resolve
from rankscope.engines import Cluster, ClusterError, ClusterStartError
from rankscope.engines.cluster import recovery
from rankscope.engines.launch import clusters
from rankscope.engines.launch.files import folder_error
from rankscope.engines.launch.launched import Launched
from rankscope.engines.wire.launchers import launchers_of, needs_launcher


def test_mpi_needs_its_launcher() -> None:
    assert launchers_of(BackendConfig("cpu:mpi,cuda:nccl")) == ["mpi"]
    assert launchers_of(BackendConfig("cpu:tcp,cuda:nccl")) == []


def test_a_third_party_backend_names_its_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = replace(resolve("gloo"), name="mine", launcher="slurm")
    monkeypatch.setitem(Backend.registry, "mine", mine)
    assert launchers_of(BackendConfig("cpu:mine")) == ["slurm"]
    assert needs_launcher("cpu:mine")


def test_a_name_that_only_contains_mpi_is_another_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A substring search took the ranks of ``dmpi`` for an MPI job."""
    monkeypatch.setitem(
        Backend.registry, "dmpi", replace(resolve("gloo"), name="dmpi", launcher=None)
    )
    assert not needs_launcher("cpu:dmpi")
    # Whatever a rank reports.
    assert not needs_launcher("cpu:nowhere")


def test_advice_about_an_unusable_backend_is_one_sentence() -> None:
    """A reason that ended with a full stop was followed by a semicolon."""
    refused = [("cpu", "gloo", "it is missing.")]
    answers = SimpleNamespace(all=lambda: {0: refused, 1: refused})
    registry: Any = SimpleNamespace(
        advice=[], ask=lambda request: answers, backend="gloo", timeout=None
    )
    recovery._new_groups(registry)
    assert registry.advice == [
        "gloo cannot be used on ranks 0–1: it is missing; cpu arrays will be refused"
    ]


@pytest.mark.processes
def test_the_error_of_a_start_is_told_whatever_becomes_of_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        hosts = None

        def reserve(self, *_: object) -> None:
            """There is nothing to wait for."""

        def start(self, *_: object) -> None:
            raise ClusterError("the controller did not start")

        def stop(self) -> None:
            raise OSError("no such job")

    monkeypatch.setattr(clusters, "prepare", lambda *_, **__: Failing())
    with pytest.raises(ClusterError, match="the controller did not start"):
        Cluster(1)
    assert "the ranks that did not start could not all be ended" in caplog.text
    assert "no such job" in caplog.text


def test_a_folder_that_takes_no_files_is_named_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk was an `OSError` of a library, or one that named no folder."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    copied = OSError(*full.args, "/lib/README", None, "/home/me/.ipython/README")

    def refuses(**_: object) -> NoReturn:
        raise copied

    monkeypatch.setattr("ipyparallel.Cluster", refuses)
    with pytest.raises(ClusterStartError) as caught:
        Cluster(1)
    assert str(caught.value) == (
        "/home/me/.ipython takes no files (No space left on device): make room there, "
        "or name a folder elsewhere by IPYTHONDIR, in the environment in which Jupyter "
        "starts"
    )
    said = str(folder_error(full, "/home/me/.ipython/profile_default"))
    assert said.startswith("/home/me/.ipython/profile_default takes no files (")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    temporary = OSError(errno.EROFS, "Read-only file system", f"{tmp_path}/tmp1")
    said = str(folder_error(temporary, "/home/me/.ipython/profile_default"))
    assert said.startswith(f"{tmp_path} takes no files (Read-only file system): ")
    assert " by TMPDIR, " in said
    assert folder_error(OSError(errno.ENOENT, "none", "/x"), "/home") is None


def test_the_controller_is_ended_although_the_engines_are_not() -> None:
    ended = []

    async def stop_controller() -> None:
        await asyncio.sleep(0)
        ended.append("controller")

    async def stop_engines() -> None:
        raise OSError("no such job")

    launched = Launched.__new__(Launched)
    cluster: Any = SimpleNamespace(
        stop_controller=stop_controller, stop_engines=stop_engines, engines={}
    )
    launched.cluster = cluster
    with pytest.raises(OSError, match="no such job"):
        asyncio.run(launched._stop_both())
    assert ended == ["controller"]
