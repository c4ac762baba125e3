"""The notebook on collectives is executed; its pictures are the definitions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.execution import execute, text_of

PATH = Path(__file__).parents[2] / "notebooks" / "02_collectives.ipynb"

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(400)]

RANKS = range(4)
SUMS = [[60, 64, 68, 72]]

# What each rank holds in the end; rank r began with 10 r, 10 r + 1, …
AFTER: dict[str, list[list[list[int]]]] = {
    "pictures": [[[10 * r + i for i in range(4)]] for r in RANKS],
    "broadcast": [[[10, 11, 12, 13]] for _ in RANKS],
    "scatter": [[[10 + r]] for r in RANKS],
    "gather": [[], [[10 * r, 10 * r + 1] for r in RANKS], [], []],
    "reduce": [
        SUMS if r == 1 else [[10 * r, 10 * r + 1, 10 * r + 2, 10 * r + 3]]
        for r in RANKS
    ],
    "all-gather": [[[0, 1], [10, 11], [20, 21, 22], [30, 31]] for _ in RANKS],
    "all-gather-tensor": [[[0, 1, 10, 11, 20, 21, 30, 31]] for _ in RANKS],
    "all-reduce": [SUMS for _ in RANKS],
    "reduce-scatter-list": [[[SUMS[0][r]]] for r in RANKS],
    "reduce-scatter": [[[SUMS[0][r]]] for r in RANKS],
    "all-to-all": [[[r], [10 + r], [20 + r], [30 + r]] for r in RANKS],
    "uneven": [
        [],
        [[0, 10, 20, 30]],
        [[1, 2, 11, 12, 21, 22, 31, 32]],
        [[3, 4, 5, 13, 14, 15, 23, 24, 25, 33, 34, 35]],
    ],
    "send-recv": [[[0, 1]], [[-1, -1]], [[-1, -1]], [[0, 1]]],
    "batch": [[[30, 31]], [[0, 1]], [[10, 11]], [[20, 21]]],
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """Cell id → its text."""
    notebook = execute(PATH)
    for cell in notebook.cells:
        if cell.id.endswith("-picture"):
            assert any("text/html" in output.get("data", {}) for output in cell.outputs)
    return {c.id: text_of(c) for c in notebook.cells if c.cell_type == "code"}


def _drawn(text: str) -> list[list[list[int]]]:
    """The right-hand side of a picture, a row for each rank."""
    return [
        []
        if row.strip() == "nothing"
        else [
            [-1 if number == "·" else int(number) for number in array.split()]
            for array in row.split("|")
        ]
        for row in re.findall(r"^rank \d .*→(.*)$", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("name", list(AFTER))
def test_what_moved_where(outputs: dict[str, str], name: str) -> None:
    assert _drawn(outputs[f"{name}-picture"]) == AFTER[name]


def test_an_all_reduce_in_two_steps(outputs: dict[str, str]) -> None:
    sums = "[60 64 68 72]"
    assert outputs["identity"].strip() == (f"[0-3] two steps {sums}, one step {sums}")


def test_the_barrier_waits_for_the_last(outputs: dict[str, str]) -> None:
    waited = [
        int(ms) for ms in re.findall(r"waited +(\d+) ms", outputs["barrier-show"])
    ]
    assert len(waited) == 4
    assert waited[0] > 200
    assert waited[3] < waited[0] - 100


def test_the_monitored_barrier_names_who_is_missing(outputs: dict[str, str]) -> None:
    assert outputs["monitored"].startswith("[0,2] monitored_barrier #1")
    assert "ranks 1, 3 did not reach it within 1 s" in outputs["monitored"]
    assert "array([6])" in outputs["monitored-after"]


def test_messages_objects_and_sparse_matrices(outputs: dict[str, str]) -> None:
    assert "a message from rank 0" in outputs["send-recv"]
    assert "[0-3] {'learning rate': 0.001, 'layers': (64, 64)}" in outputs["objects"]
    assert "[0-3] [0, 1, 2, 3]" in outputs["objects"]
    assert re.findall(r"rank (\d) goes (\w+)", outputs["objects"]) == [
        ("0", "north"),
        ("1", "east"),
        ("2", "south"),
        ("3", "west"),
    ]
    assert "[0-3] 5 numbers of 64,000,000: [1. 1. 1. 1. 4.]" in outputs["sparse"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a column of a matrix", "ValueError: .*not C-contiguous"),
        ("a list", "TypeError: .*tensor is a list"),
        ("an output that is too small", "ValueError: .*4 elements; expected 16"),
        ("two dtypes", "TypeError: .*float64.*float32; expected one dtype"),
        ("a rank that is not there", r"ValueError: .*src=4"),
        ("a list on every rank", "ValueError: .*this rank is not the root"),
    ],
)
def test_mistakes_are_named(outputs: dict[str, str], what: str, message: str) -> None:
    assert re.search(rf"\] +{what}\n.*{message}", outputs["mistakes"])


def test_a_rank_that_does_not_call(outputs: dict[str, str]) -> None:
    assert re.search(r"Dist(Timeout|Aborted)Error: all_reduce #2", outputs["hang"])
    assert "1 s" in outputs["hang"]
    assert "rebuild_process_group()" in outputs["hang"]
    assert "[0-3] array([60, 64, 68, 72])" in outputs["hang-after"]
