"""Notebooks as they are committed: valid, and without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_valid_and_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_executed_by_a_test(path: Path) -> None:
    """Each notebook has a module that runs it, beside this one or in `with_torch`."""
    here = Path(__file__).parent
    tests = [*here.glob("test_*.py"), *(here.parent / "with_torch").glob("test_*.py")]
    assert any(path.name in test.read_text(encoding="utf-8") for test in tests)


def test_quickstart_is_there() -> None:
    assert NOTEBOOKS[0].name == "01_quickstart.ipynb"
