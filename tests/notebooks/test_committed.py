"""Notebooks as they are committed: valid, and without outputs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import nbformat
import pytest

from tools import lab
from tools.notebook_outputs import NOTEBOOKS, tracked_notebooks


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


@pytest.mark.processes
def test_what_a_person_adds_is_no_notebook_of_the_repository(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    for name in ("01_ours.ipynb", "theirs.ipynb"):
        (tmp_path / "notebooks" / name).touch()
    ours, theirs = sorted((tmp_path / "notebooks").iterdir())
    # As where the files of the repository were copied.
    assert tracked_notebooks(tmp_path) == [ours, theirs]
    subprocess.run(["git", "-C", tmp_path, "init", "-q"], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", ours], check=True)
    assert tracked_notebooks(tmp_path) == [ours]


def test_the_lab_has_copies_and_keeps_what_a_person_has_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.main(tmp_path)
    first, *others = NOTEBOOKS
    assert all(
        (tmp_path / path.name).read_bytes() == path.read_bytes() for path in NOTEBOOKS
    )
    assert (tmp_path / "dummy_backend" / "setup.py").is_file()
    own = nbformat.read(tmp_path / first.name, as_version=4)
    own.cells[1].source = "mine"
    nbformat.write(own, tmp_path / first.name)
    (tmp_path / others[0].name).unlink()
    assert capsys.readouterr().out == ""
    lab.main(tmp_path)
    assert nbformat.read(tmp_path / first.name, as_version=4) == own
    assert (tmp_path / others[0].name).is_file()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path / first.name}: its cells are not those of ")
