"""The quickstart notebook is executed, and shows what its text promises."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tools.execution import execute, text_of

PATH = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """Cell id → its text."""
    notebook = execute(PATH)
    return {c.id: text_of(c) for c in notebook.cells if c.cell_type == "code"}


def _arrays(text: str) -> list[list[float]]:
    """Every bracketed list of numbers, innermost only; not the ranks' prefixes."""
    text = re.sub(r"^\[[\d,-]+\] +", "", text, flags=re.MULTILINE)
    return [
        [float(number) for number in found.replace(",", " ").split()]
        for found in re.findall(r"\[([-\d., e+]+)\]", text)
    ]


def test_every_rank_is_a_process_of_its_own(outputs: dict[str, str]) -> None:
    found = re.findall(r"rank (\d) of 4 is process (\d+)", outputs["hello"])
    assert sorted(rank for rank, _ in found) == ["0", "1", "2", "3"]
    assert len({pid for _, pid in found}) == 4


def test_all_reduce(outputs: dict[str, str]) -> None:
    before = re.findall(r"before (\[.*?\])", outputs["all-reduce"])
    assert sorted(_arrays(" ".join(before))) == [[r] * 3 for r in (1.0, 2.0, 3.0, 4.0)]
    # All ranks got the same, so it is shown once.
    after = re.findall(r"^(\S+) +after +(\[.*?\])", outputs["all-reduce"], re.M)
    assert after == [("[0-3]", "[10. 10. 10.]")]
    assert _arrays(outputs["all-reduce-max"]) == [[30.0]]


def test_broadcast(outputs: dict[str, str]) -> None:
    assert _arrays(outputs["broadcast"]) == [[0.0, 0.25, 0.5, 0.75, 1.0]]


def test_all_gather(outputs: dict[str, str]) -> None:
    assert _arrays(outputs["all-gather"]) == [[r, r * r] for r in range(4)]


def test_async_leaves_time_for_other_work(outputs: dict[str, str]) -> None:
    found = re.findall(
        r"issued in ([\d.]+) ms, over after ([\d.]+) ms, ([\d,]+) random points",
        outputs["async"],
    )
    assert len(found) == 4
    assert all(float(issued) < float(over) + 1 for issued, over, _ in found)
    # Whoever waited for the late rank had time for it.
    points = sorted(int(count.replace(",", "")) for *_, count in found)
    assert points[1] > 0
    assert "big is 10.0 everywhere" in outputs["async-result"]
    pi = re.search(r"π is about ([\d.]+)", outputs["async-result"])
    assert pi is not None
    assert abs(float(pi[1]) - np.pi) < 0.1


def test_subgroups(outputs: dict[str, str]) -> None:
    found = re.findall(r"sum of my group (\[.*?\]): ([\d.]+)", outputs["subgroup"])
    assert sorted(found) == [("[0, 2]", "4.0"), ("[1, 3]", "6.0")]
    assert _arrays(outputs["subgroup-ranks"]) == [[300.0]]


def test_k_means_is_right(outputs: dict[str, str]) -> None:
    text = outputs["kmeans-check"]
    difference = re.search(r"largest difference between the two: (\S+)", text)
    assert difference is not None
    assert float(difference[1]) < 1e-8
    assert re.search(r"one rank [\d.]+ s, 4 ranks [\d.]+ s", text)

    centres = np.array(_arrays(outputs["pull"]))
    assert centres.shape == (6, 8)
    places = np.random.default_rng(2024).uniform(-10, 10, (6, 8))
    for place in places:
        assert abs(centres - place).max(axis=1).min() < 0.05


def test_status_names_every_rank(outputs: dict[str, str]) -> None:
    for group in ("default", "even", "odd"):
        assert group in outputs["status"]
    assert "all_reduce" in outputs["status"]
