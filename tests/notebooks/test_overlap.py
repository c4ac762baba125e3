"""The notebook on overlap is executed, and measures what its text promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.execution import execute, text_of

PATH = Path(__file__).parents[2] / "notebooks" / "04_overlap.ipynb"

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """Cell id → its text."""
    notebook = execute(PATH)
    return {c.id: text_of(c) for c in notebook.cells if c.cell_type == "code"}


def test_works_run_one_after_the_other(outputs: dict[str, str]) -> None:
    found = re.findall(
        r"#(\d+) took +([\d.]+) ms, was over after +([\d.]+) ms", outputs["work"]
    )
    first, second, third = [int(number) for number, *_ in found]
    assert (second, third) == (first + 1, first + 2)
    overs = [float(over) for *_, over in found]
    assert overs == sorted(overs)
    # A duration is the op's own: without the time in the queue.
    assert sum(float(took) for _, took, _ in found) <= overs[-1] + 1
    assert all(float(took) > 0 for _, took, _ in found)


@pytest.mark.parametrize(
    ("cell", "first", "second"),
    [
        ("hide-wait", "one after the other", "at the same time"),
        ("buckets", "sum at the end", "sum as they come"),
    ],
)
def test_a_gain_is_that_of_the_times_beside_it(
    outputs: dict[str, str], cell: str, first: str, second: str
) -> None:
    found = re.search(
        rf"{first} +([\d.]+) ms\n.*{second} +([\d.]+) ms, ([\d.]+) times as fast",
        outputs[cell],
    )
    assert found is not None
    slow, fast, gain = map(float, found.groups())
    assert gain == pytest.approx(slow / fast, abs=0.02)


def test_coalescing_is_measured_and_exact(outputs: dict[str, str]) -> None:
    rows = re.findall(
        r"\] +(\w[\w, ]+?) +([\d.]+) ms +([\d,]+) arrays per second",
        outputs["coalesce"],
    )
    assert all(float(ms) > 0 for _, ms, _ in rows)
    assert [name for name, *_ in rows] == [
        "one by one",
        "async, then wait",
        "coalesced",
        "one flat array",
    ]
    assert (
        "64 arrays, 1 call of the backend, all of them 3.0"
        in (outputs["coalesce-check"])
    )
    assert "[0-1] 3 calls; sums 6.0, gathered [0. 1.]" in outputs["coalesce-mixed"]
    assert re.findall(r"my part \[(\d+)", outputs["coalesce-mixed"]) == ["20", "40"]


def test_the_summary_has_a_bar_for_each_gain(outputs: dict[str, str]) -> None:
    assert len(re.findall(r"[\d.]+ ×  █", outputs["summary"])) == 3
