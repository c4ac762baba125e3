"""A group whose config has no backend that can be used here is refused at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import rankscope as dist
from rankscope.backends.groups.config import default_instead, why_unusable
from rankscope.backends.interface import registry
from rankscope.backends.interface.base import Backend
from rankscope.backends.interface.registry import resolve


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library of gloo, none of MPI: what Rankscope alone brings."""
    for name, reason in {
        "gloo": "xoscar 0.12.2 is not installed: pip install xoscar==0.12.2.",
        "mpi": "mpi4py is not installed: pip install 'rankscope[mpi]'",
    }.items():
        there = replace(resolve(name), unavailable=partial(str, reason))
        monkeypatch.setitem(Backend.registry, name, there)


def _refused(backend: str) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        dist.init_process_group(backend, rank=0, world_size=1)
    assert not dist.is_initialized()
    return str(caught.value)


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("gloo", "xoscar 0.12.2 is not installed: pip install xoscar==0.12.2"),
        ("cpu:mpi", "mpi4py is not installed: pip install 'rankscope[mpi]'"),
    ],
)
def test_what_is_missing_comes_first_and_the_default_after_it(
    backend: str, reason: str
) -> None:
    assert _refused(backend) == (
        f"init_process_group: {reason}. The default, tcp, needs no further package: "
        "init_process_group()"
    )


@pytest.mark.usefixtures("without")
def test_another_backend_does_not_stand_in_by_itself() -> None:
    assert why_unusable("cpu:gloo") is not None


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("backend", [None, "", "tcp", "cpu:tcp"])
def test_the_default_needs_no_other_package(backend: str | None) -> None:
    assert why_unusable(backend) is None


def test_who_named_the_default_is_not_sent_to_it() -> None:
    assert default_instead("cpu:tcp,cuda:nccl", "call()") == ""
    assert default_instead(None, "call()") == ""


@pytest.mark.usefixtures("without")
def test_one_backend_that_may_work_is_enough() -> None:
    assert why_unusable("cpu:gloo,cuda:nccl") is None
    assert why_unusable("cuda:nccl") is None


def test_a_package_is_not_imported_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "declared", lambda: {"theirs": []})
    assert why_unusable("cpu:theirs") is None
