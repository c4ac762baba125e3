"""A group whose config has no backend that can be used here is refused at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import rankscope as dist
from rankscope.backends.groups.config import why_unusable
from rankscope.backends.install import pip_install, with_extra
from rankscope.backends.interface import entry_points
from rankscope.backends.interface.base import Backend
from rankscope.backends.interface.registry import resolve


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library of gloo, none of MPI: what a person on another platform has."""
    for name, reason in {
        "gloo": "xoscar 0.12.2 is not installed: pip install xoscar==0.12.2.",
        "mpi": "mpi4py is not installed: pip install 'rankscope[mpi]'",
    }.items():
        there = replace(resolve(name), unavailable=partial(str, reason))
        monkeypatch.setitem(Backend.registry, name, there)


@pytest.fixture
def with_mpi_only(without: None, monkeypatch: pytest.MonkeyPatch) -> None:
    there = replace(resolve("mpi"), unavailable=lambda: None)
    monkeypatch.setitem(Backend.registry, "mpi", there)


def _refused(backend: str | None) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        dist.init_process_group(backend, rank=0, world_size=1)
    assert not dist.is_initialized()
    return str(caught.value)


@pytest.mark.usefixtures("without")
def test_what_is_missing_comes_first_and_the_remedies_after_it() -> None:
    assert _refused(None) == (
        "init_process_group: xoscar 0.12.2 is not installed: pip install "
        "xoscar==0.12.2. To use MPI instead: "
        f"{pip_install(with_extra('mpi'))}, then "
        "init_process_group('cpu:mpi') on ranks that mpiexec starts"
    )


@pytest.mark.usefixtures("with_mpi_only")
def test_mpi_does_not_stand_in_by_itself() -> None:
    message = _refused(None)
    assert "To use MPI instead: init_process_group('cpu:mpi')" in message
    assert why_unusable("cpu:mpi") is None


@pytest.mark.usefixtures("without")
def test_who_named_mpi_is_not_sent_to_mpi() -> None:
    assert _refused("cpu:mpi") == (
        "init_process_group: mpi4py is not installed: pip install 'rankscope[mpi]'"
    )


@pytest.mark.usefixtures("without")
def test_one_backend_that_may_work_is_enough() -> None:
    assert why_unusable("cpu:gloo,cuda:nccl") is None
    assert why_unusable("cuda:nccl") is None


def test_a_package_is_not_imported_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "declared", lambda: {"theirs": []})
    assert why_unusable("cpu:theirs") is None
