"""The notebook on NCCL is executed, with what there is: a GPU or none."""

from __future__ import annotations

from pathlib import Path

import pytest

import rankscope as dist
from tools.execution import outputs_of

PATH = Path(__file__).parents[2] / "notebooks" / "06_nccl.ipynb"

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """Cell id → its text."""
    return outputs_of(PATH, patience=3)


def test_the_host_does_its_part(outputs: dict[str, str]) -> None:
    assert "[0-1] on the host:   [3. 3. 3. 3.]" in outputs["both"]
    assert "[0-1] on the host:   [3. 3. 3. 3.]" in outputs["after"]


def test_a_deadline_ends_the_hang(outputs: dict[str, str]) -> None:
    """Nobody clicks here; a rebuild of what is rebuilt does no harm."""
    assert "CellTimeout: not done after 3 s" in outputs["hang"]
    assert "group 'default' rebuilt" in outputs["hang"]
    assert "all groups rebuilt" in outputs["rebuild"]


def test_it_measures_what_there_is(outputs: dict[str, str]) -> None:
    assert "busbw" in outputs["bench"]


@pytest.mark.skipif(dist.is_nccl_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_it_leaves_out(outputs: dict[str, str]) -> None:
    reason = dist.unavailable_reason("nccl")
    assert f"nccl cannot be used on ranks 0–1: {reason}" in outputs["init"]
    assert f"[0-1] no NCCL here: {reason}" in outputs["there"]
    for cell in ("both", "wait", "coalesce"):
        assert "[0-1] left out without a GPU: " in outputs[cell]
    assert "[0-1] a new sum, on the host: [2. 2. 2. 2.]" in outputs["after"]
    assert not any("shared GPU" in text for text in outputs.values())


@pytest.mark.gpu
@pytest.mark.skipif(not dist.is_nccl_available(), reason="there is no GPU here")
def test_on_a_gpu_it_shows_what_it_promises(outputs: dict[str, str]) -> None:
    assert "[0-1] NCCL can be used" in outputs["there"]
    assert "[0-1] on the device: [3. 3. 3. 3.]" in outputs["both"]
    assert "µs until wait() was back" in outputs["wait"]
    assert "coalesced" in outputs["coalesce"]
    assert "all_reduce is back" in outputs["hang"]
    assert "[0-1] a new sum, on the device: [2. 2. 2. 2.]" in outputs["after"]
