"""Execute the notebooks and keep them with their outputs, for the site.

``python -m tools.notebook_outputs [01 05 ...]`` writes ``docs/notebooks``. Those on
torch run in ``.venv-torch``. What hangs in them is ended by its deadline, for nobody
clicks on the board. A build of the site executes nothing: `tools.notebook_pages` shows
what is there, and a test tells when a notebook has changed since.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat

from tools.execution import CellRun, execute
from tools.other_environments import torch_python

__all__ = ["KEPT", "NOTEBOOKS", "as_executed", "main", "tracked_notebooks"]

ROOT = Path(__file__).resolve().parent.parent


def tracked_notebooks(root: Path) -> list[Path]:
    """Return the notebooks that git tracks; all, in a tree without a repository.

    A person's own may lie beside them.
    """
    found = sorted((root / "notebooks").glob("*.ipynb"))
    if not (root / ".git").exists():
        return found
    command = ["git", "-C", str(root), "ls-files", "notebooks"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    tracked = set(listed.stdout.splitlines())
    return [path for path in found if f"notebooks/{path.name}" in tracked]


NOTEBOOKS = tracked_notebooks(ROOT)
#: Where the notebooks with outputs are.
KEPT = ROOT / "docs" / "notebooks"
#: Those that the default environment does not suffice for.
OF_TORCH = ("07", "09")

#: Seconds after which a cell that hangs is ended; the verdict comes after five.
PATIENCE = 8


def as_executed(cell_id: str, source: str) -> str:
    """Return the source of a cell as it is executed: its patience is shorter."""
    if cell_id != "patience":
        return source
    return re.sub(r"^patience = \d+", f"patience = {PATIENCE}", source)


def _keep(path: Path) -> None:
    """Execute a notebook, and write it with its outputs."""

    def hurry(run: CellRun) -> None:
        run.cell.source = as_executed(run.cell.id, run.cell.source)

    began = time.perf_counter()
    notebook = execute(path, before=hurry)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [_reduced(one) for one in cell.outputs]
    # Widgets are for a kernel that is gone.
    notebook.metadata.pop("widgets", None)
    KEPT.mkdir(exist_ok=True)
    nbformat.write(notebook, KEPT / path.name)
    print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)


def _reduced(output: Any) -> Any:
    """Return an output without what no page shows, and without this machine's paths."""
    for data in (output, output.get("data", {})):
        for key, value in data.items():
            if isinstance(value, str):
                data[key] = _anywhere(value)
            elif isinstance(value, list):  # a traceback
                data[key] = [_anywhere(str(line)) for line in value]
    if "data" in output:
        shown = ("text/html", "image/png", "text/plain")
        output.data = {key: output.data[key] for key in shown if key in output.data}
        if "text/html" in output.data:
            output.data.pop("image/png", None)
        output.metadata = {}
    return output


def _anywhere(text: str) -> str:
    """Return `text` as it is on another machine, as far as names go."""
    host = rf"\b{re.escape(socket.gethostname())}\b"
    # What pip is to install is the checkout, in which the commands are typed.
    text = text.replace(f"{ROOT}[", ".[").replace(str(ROOT), "rankscope")
    return re.sub(host, "node", text)


def main(wanted: Sequence[str]) -> int:
    """Execute the notebooks whose names begin with one of `wanted` (default: all)."""
    here = ".venv-torch" in sys.executable
    chosen = [
        path for path in NOTEBOOKS if not wanted or path.name.startswith(tuple(wanted))
    ]
    later = []
    for path in chosen:
        if path.name.startswith(OF_TORCH) and not here:
            later.append(path.name)
        else:
            _keep(path)
    if not later:
        return 0
    python = torch_python(print, lambda reason: print(reason, file=sys.stderr))
    if python is None:
        return 1
    command = [python, "-m", "tools.notebook_outputs", *later]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
