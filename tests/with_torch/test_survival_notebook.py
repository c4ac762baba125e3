"""The notebook on a training that survives is executed: two ranks are killed in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.execution import outputs_of

PATH = Path(__file__).parents[2] / "notebooks" / "09_training_that_survives.ipynb"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """Cell id → its text."""
    return outputs_of(PATH, patience=3)


def test_each_death_is_named(outputs: dict[str, str]) -> None:
    for cell, rank in ("kill", 1), ("kill-2", 2):
        assert f"rank {rank}: EngineDied: killed by SIGKILL" in outputs[cell]


def test_all_ranks_go_on_together(outputs: dict[str, str]) -> None:
    for rank in range(3):
        assert f"rank {rank} goes on after step 50" in outputs["rejoin"]
    assert "without rank 2: 2 ranks, after step 80" in outputs["shrink"]


def test_the_curve_is_that_of_one_process(outputs: dict[str, str]) -> None:
    found = re.search(r"140 steps, at most (\S+) from one process", outputs["curve"])
    assert found is not None
    assert float(found[1]) <= 1e-5
