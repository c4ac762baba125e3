"""Which launcher starts the engines: a backend registers the one that it needs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.backends import Backend, BackendConfig
from rankscope.backends.interface.registry import resolve
from rankscope.engines.cluster import recovery
from rankscope.engines.cluster.launch import launchers_of, needs_launcher


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
