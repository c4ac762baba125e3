"""The board over torch's own groups, in JupyterLab: a hang of DDP, ended and mended.

The notebook on DDP, with a kernel of the environment that has torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.other_environments import torch_python

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.widgets.person import Person

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(600)]

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "07_ddp.ipynb"


@pytest.fixture(scope="module")
def person(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Person]:
    """Somebody in the notebook on DDP, with four ranks of torch and their board."""
    from tests.widgets.lab import lab
    from tests.widgets.person import Person

    reasons: list[str] = []
    python = torch_python(print, reasons.append)
    assert python is not None, reasons
    with lab(tmp_path_factory.mktemp("lab"), browser, kernels=(python,)) as server:
        found = Person(server.open(NOTEBOOK, python=python), "torch")
        found.finish("load")
        assert "group 'default_pg' of torch" in found.finish("init")
        found.notebook.board.wait_for()
        # What each test builds on: a retest runs one without the others.
        for cell in ("patience", "model"):
            found.finish(cell)
        yield found
        found.finish("shutdown")


def test_the_groups_of_torch_are_marked(person: Person) -> None:
    person.finish("train")
    person.banner("^Idle")
    person.shot("01-trained")
    assert any("default_pg · torch" in text for text in person.texts("tab"))


def test_a_slow_rank_is_on_the_timeline(person: Person) -> None:
    person.finish("slow")
    person.button("Timeline").click()
    lanes = person.notebook.board.locator("canvas.lanes")
    lanes.wait_for()
    person.shot("02-slow-rank")
    person.button("Timeline").click()


def test_a_hang_in_backward_is_named_ended_and_mended(person: Person) -> None:
    person.finish("before")
    person.run("hang")
    said = person.verdict("^Missing ranks")
    assert re.search(
        r"Rank 2 has not entered all_reduce #\d+ \(cell \d+ line \d+, called at "
        r"cell \d+ line \d+\): it left cell \d+ .*; ranks 0–1, 3 wait in it",
        said,
    ), said
    person.shot("03-hang")
    output = person.abort("hang")
    assert "DistAbortedError" in output
    assert "rank 2 has not entered" in output
    person.shot("04-aborted")
    person.rebuild()
    person.shot("05-rebuilt")
    assert "loss " in person.finish("rewrap")
