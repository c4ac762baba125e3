"""``make demo``: execute the quickstart notebook and print what each rank got."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbconvert import HTMLExporter

from tools.execution import CellRun, execute, text_of

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "01_quickstart.ipynb"
RESULT = ROOT / "build" / "demo" / NOTEBOOK.name

__all__ = ["main"]


def _announce(run: CellRun) -> None:
    print(f"\n[{run.index}/{run.total}] {run.title}", flush=True)


def _report(run: CellRun) -> None:
    text = text_of(run.cell).rstrip()
    if text:
        print(textwrap.indent(text, "    ", lambda line: True))
    print(f"    ({run.seconds:.2f} s)", flush=True)


def main() -> int:
    """Run the notebook; write it and its HTML under ``build/demo``."""
    print(
        f"Executing {NOTEBOOK.relative_to(ROOT)} with Python {sys.version.split()[0]}"
    )
    start = time.perf_counter()
    try:
        notebook = execute(NOTEBOOK, before=_announce, after=_report)
    except CellExecutionError:
        print("\nThe notebook ended at the error above.", file=sys.stderr)
        return 1
    except CellTimeoutError as error:
        print(f"\nThe notebook did not go on: {error}", file=sys.stderr)
        return 1
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, RESULT)
    html, _ = HTMLExporter().from_notebook_node(notebook)
    page = RESULT.with_suffix(".html")
    page.write_text(html, encoding="utf-8")
    print(f"\nAll of it took {time.perf_counter() - start:.1f} s. With its outputs:")
    print(f"    {page.relative_to(ROOT)}")
    print(f"    {RESULT.relative_to(ROOT)}")
    print("To run the cells yourself, in JupyterLab:")
    print(f"    make lab        and open {NOTEBOOK.name} there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
