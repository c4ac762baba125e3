"""The notebook on RPC is executed by nobody: a deadline ends its hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.execution import outputs_of

PATH = Path(__file__).parents[2] / "notebooks" / "08_rpc.ipynb"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """Cell id → its text."""
    return outputs_of(PATH, patience=3)


def test_the_trainers_train(outputs: dict[str, str]) -> None:
    assert outputs["train"].count("loss ") == 2
    assert outputs["go-on"].count("loss ") == 2


def test_the_hang_names_both_lines(outputs: dict[str, str]) -> None:
    said = outputs["hang"]
    assert "CellTimeout: not done after 3 s" in said
    assert (
        "rank 1 waits in cell 7 line 3 `rpc_sync to server` for `synchronize`" in said
    )
    assert "rank 0 runs `synchronize`, at cell 5 line 17" in said
    assert "rebuilt" not in said


def test_the_function_still_runs_after_the_abort(outputs: dict[str, str]) -> None:
    assert "rpc · torch · ranks 0–2 · tensorpipe" in outputs["status"]
    assert "in run synchronize" in outputs["status"]
    assert outputs["catch-up"] == ""


def test_the_end_is_silent(outputs: dict[str, str]) -> None:
    assert outputs["end"] == ""
