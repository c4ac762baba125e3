"""Copy the tutorials into the folder that ``make lab`` opens: ``python -m tools.lab``.

What a person runs, changes and adds there is no file of the repository.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat

from tools.notebook_outputs import NOTEBOOKS, ROOT

__all__ = ["LAB", "main"]

#: Not below ``build``, which ``make clean`` removes.
LAB = ROOT / "lab"


def main(folder: Path = LAB) -> None:
    """Copy what is missing in `folder`; name the copies of other versions."""
    folder.mkdir(exist_ok=True)
    for path in NOTEBOOKS:
        copy = folder / path.name
        if not copy.exists():
            shutil.copyfile(path, copy)
        elif _sources(copy) != _sources(path):
            print(f"{copy}: its cells are not those of {path}; delete it to have these")
    # What tutorial 03 compiles.
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(
        ROOT / "notebooks" / "dummy_backend",
        folder / "dummy_backend",
        ignore=ignored,
        dirs_exist_ok=True,
    )


def _sources(path: Path) -> list[str] | None:
    """Return the cells of a notebook; ``None`` for a file that is none."""
    try:
        return [cell.source for cell in nbformat.read(path, as_version=4).cells]
    except nbformat.reader.NotJSONError:
        return None


if __name__ == "__main__":
    main()
