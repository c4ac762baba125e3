"""The notebook on DDP is executed by nobody: a deadline ends its hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.execution import outputs_of

PATH = Path(__file__).parents[2] / "notebooks" / "07_ddp.ipynb"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """Cell id → its text."""
    return outputs_of(PATH, patience=3)


def test_the_groups_of_torch_are_on_the_board(outputs: dict[str, str]) -> None:
    assert "default_pg · torch · ranks 0–3" in outputs["init"]
    assert "all_reduce" in outputs["init"]


def test_the_hang_names_the_rank_that_left_a_branch_out(
    outputs: dict[str, str],
) -> None:
    said = " ".join(outputs["hang"].split())
    assert "CellTimeout: not done after 3 s Why: rank 2 has not entered" in said
    assert "ranks 0–1, 3 wait in it" in said
    assert "group 'default_pg' rebuilt" in said


def test_the_training_goes_on_to_the_same_loss(outputs: dict[str, str]) -> None:
    # Ranks print in the order in which they come to it.
    before, after = (sorted(outputs[cell].splitlines()) for cell in ("train", "rewrap"))
    assert after == before
    assert len(after) == 4
    for line in after:
        first, last = map(float, line.partition("loss ")[2].split(" -> "))
        assert last < first / 2, "it learns"
