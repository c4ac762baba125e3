"""Magics against ipyparallel's own, measured in a real notebook kernel."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import nbformat

from tools.execution import execute, text_of

from .table import Row, Sample

__all__ = ["empty_cell", "start_up"]

ROOT = Path(__file__).resolve().parent.parent
CELL_BUDGET = 1.2


def empty_cell(rounds: int) -> list[Row]:
    """Compare an empty cell on 4 ranks with `%%px --block` on the same engines."""
    times = _in_kernel(f"empty_cells({rounds}, 20)")
    return [
        Row.compare(
            "empty %%distributed cell, 4 ranks, against %%px --block",
            times["distributed"],
            times["px"],
            CELL_BUDGET,
        )
    ]


def start_up(rounds: int) -> list[Row]:
    """From `%dist_init -n 4` to the first all_reduce against a bare cluster's start."""
    times = _in_kernel(f"start_up({rounds})")
    return [
        Row.compare(
            "%dist_init -n 4 to first all_reduce, against ipp.Cluster(n=4) and apply",
            times["dist_init"],
            times["bare"],
            None,
        )
    ]


def _in_kernel(call: str) -> dict[str, Sample]:
    """Run one function of `bench.in_kernel` in a kernel; return what it reports."""
    source = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"from bench import in_kernel\nin_kernel.{call}"
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "bench.ipynb"
        cell = nbformat.v4.new_code_cell(source)
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
        notebook = execute(path, timeout=900)
    for line in text_of(notebook.cells[0]).splitlines():
        if line.startswith("TIMES "):
            times = json.loads(line.removeprefix("TIMES "))
            return {name: Sample(rounds) for name, rounds in times.items()}
    raise RuntimeError(f"bench.in_kernel.{call} reported nothing")
