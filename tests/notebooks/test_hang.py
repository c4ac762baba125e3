"""The notebook on hangs is executed by nobody: its deadlines end what hangs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.execution import outputs_of

PATH = Path(__file__).parents[2] / "notebooks" / "05_hang.ipynb"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """Cell id → its text."""
    return outputs_of(PATH, patience=2)


def test_a_deadline_ends_what_hangs(outputs: dict[str, str]) -> None:
    for name in ("missing", "mismatch"):
        assert "CellTimeout: not done after 2 s" in outputs[name]
        assert "group 'default' rebuilt" in outputs[name]
    for name in ("check", "mismatch-check"):
        assert "[0-3] [60. 60. 60.]" in outputs[name]


def test_a_death_ends_the_cell_and_is_mended(outputs: dict[str, str]) -> None:
    assert "SIGKILL" in outputs["dead"]
    assert "rank 3 restarted" in outputs["dead-restart"]
    assert "[0-2] kept is there" in outputs["dead-check"]
    assert re.search(r"\[3\] +kept is gone", outputs["dead-check"])


def test_the_magics_name_the_culprit(outputs: dict[str, str]) -> None:
    said = outputs["async-diagnose"]
    assert said.startswith("missing ranks: rank 2 has not entered")
    assert "wait in it" in said
    assert "aborted" in outputs["async-abort"]
    assert "rebuilt" in outputs["async-abort"]
