"""The notebooks of the site have the cells of today, and outputs to each of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tools.notebook_outputs import KEPT, NOTEBOOKS, as_executed
from tools.notebook_pages import as_markdown


def test_each_notebook_is_kept_and_listed() -> None:
    names = [path.name for path in NOTEBOOKS]
    assert sorted(path.name for path in KEPT.glob("*.ipynb")) == names
    index = (KEPT / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"^(\d\d_\w+)$", index, re.MULTILINE) == [
        path.stem for path in NOTEBOOKS
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_outputs_are_of_the_cells_of_today(path: Path) -> None:
    today = nbformat.read(path, as_version=4).cells
    kept = nbformat.read(KEPT / path.name, as_version=4).cells
    expected = [
        (one.cell_type, one.id, as_executed(one.id, one.source)) for one in today
    ]
    found = [(one.cell_type, one.id, one.source) for one in kept]
    assert found == expected, f"python -m tools.notebook_outputs {path.name[:2]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_outputs_are_those_of_a_whole_run_and_of_no_certain_machine(
    path: Path,
) -> None:
    today = nbformat.read(path, as_version=4).cells
    tags = {one.id: one.metadata.get("tags", ()) for one in today}
    kept = nbformat.read(KEPT / path.name, as_version=4)
    code = [one for one in kept.cells if one.cell_type == "code"]
    assert [one.execution_count for one in code] == [*range(1, len(code) + 1)]
    for cell in code:
        if any(output.output_type == "error" for output in cell.outputs):
            assert "raises-exception" in tags[cell.id]
    text = nbformat.writes(kept)
    assert re.findall(r"/(?:home|root|tmp|work|Users)/\S+", text) == []


def _cell(source: str, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "source": source,
        "execution_count": 3,
        "outputs": list(outputs),
    }


def _stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text}


def test_a_cell_has_its_number_and_what_it_printed_in_one_block() -> None:
    cell = _cell("print(1)", _stream("10 %\r\x1b[32m100 %\x1b[0m\n"), _stream("done\n"))
    assert as_markdown({"cells": [cell]}) == (
        "```{code-block} ipython3\n:class: input\n:caption: [3]\n\nprint(1)\n```\n\n"
        "```{code-block} text\n:class: output\n\n100 %\ndone\n```\n"
    )


def test_what_a_cell_displays_is_shown_in_its_richest_form() -> None:
    both = {"text/plain": "<Figure>", "image/png": "AAAA\n"}
    plain = {"text/plain": "5"}
    page = as_markdown(
        {
            "cells": [
                _cell("a", {"output_type": "display_data", "data": both}),
                _cell("b", {"output_type": "execute_result", "data": plain}),
                _cell("c", {"output_type": "error", "traceback": ["E: ```no```"]}),
            ]
        }
    )
    assert '<img alt="Figure" src="data:image/png;base64,AAAA">' in page
    assert "```{code-block} text\n:class: output\n\n5\n```" in page
    # The fence is longer than what it encloses.
    assert "````{code-block} text\n:class: output error\n\nE: ```no```\n````" in page


def test_a_page_has_one_title_and_its_links_stay_in_the_site() -> None:
    texts = [
        "# All\n\n## Start",
        "# One\n\n```\n# no heading\n```\n\n## Two",
        "[gpus](../docs/gpus.md), [it](../README.md), [that](folder), [n](02_x.ipynb)",
    ]
    cells = [{"cell_type": "markdown", "source": text} for text in texts]
    assert as_markdown({"cells": cells}) == (
        "# All\n\n## Start\n\n"
        "## One\n\n```\n# no heading\n```\n\n### Two\n\n"
        "[gpus](../gpus.md), `README.md`, `notebooks/folder`, [n](02_x.ipynb)\n"
    )
