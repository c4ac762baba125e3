"""The code of a cell for the ranks, with the line numbers of the notebook."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["cell_number", "numbered"]


def cell_number(shell: InteractiveShell) -> int:
    """Return the number of the running cell: newer IPythons have counted it already."""
    return int(shell.displayhook.prompt_count)


def numbered(shell: InteractiveShell, cell: str) -> str:
    """Return `cell`, a cell magic's body, with its lines numbered as in the notebook.

    Comments stand for the lines above it: IPython strips empty lines.
    """
    first = cell.lstrip("\n")
    if first.startswith("%%"):
        # Another cell magic must be on the first line.
        return cell
    # IPython accepts a cell that is indented as a whole, which comments in front
    # of it would end.
    indent = first[: len(first) - len(first.lstrip(" \t"))]
    lines = cell.splitlines(keepends=True)
    body = "".join(line.removeprefix(indent) for line in lines)
    return "# %%distributed\n" * _lines_above(shell, cell) + body


def _lines_above(shell: InteractiveShell, cell: str) -> int:
    """Return the number of lines of the notebook's cell above `cell`."""
    history = shell.history_manager
    raw = history.input_hist_raw[-1] if history is not None else ""
    start = raw.rfind(cell.rstrip("\n"))
    if start < 0:
        return 1
    # None where the cell has no first line with a magic: %dist_mode.
    return raw.count("\n", 0, start)
