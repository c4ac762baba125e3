"""Executes a notebook with this interpreter, reporting on each cell."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager, KernelManager
from nbclient import NotebookClient

from rankscope.engines.launch.ports import reserved_ports

from .kernelspec import ARGUMENT

__all__ = [
    "CellRun",
    "WithOwnPorts",
    "execute",
    "outputs_of",
    "text_of",
    "without_codes",
]

_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


#: The ports of a kernel, as its manager calls them.
_PORTS = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")


class WithOwnPorts(KernelManager):
    """Reserves the ports of its kernel.

    By itself a manager chooses ports of the range that connections get theirs from,
    and the kernel listens a second later: "Address already in use" on a busy machine.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._reserved = contextlib.ExitStack()
        ports = self._reserved.enter_context(reserved_ports(len(_PORTS)))
        # Too few are free: as by itself.
        self.cache_ports = self.cache_ports and not ports
        for name, port in zip(_PORTS, ports, strict=False):
            setattr(self, name, port)

    async def _async_cleanup_resources(self, restart: bool = False) -> None:
        await super()._async_cleanup_resources(restart=restart)
        if not restart:
            self._reserved.close()


class _ThisInterpreter(WithOwnPorts, AsyncKernelManager):
    """Runs the ipykernel of this interpreter, whatever kernels are registered.

    A kernel spec of the user's called ``python3`` may belong to any Python.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.has_trait("transport_encryption"):  # newer versions
            self.transport_encryption = "auto"

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict([ARGUMENT]))


@dataclass
class CellRun:
    """One code cell that is about to run, or has run."""

    index: int  # among the code cells, from 1
    total: int
    title: str  # the heading it stands under
    cell: nbformat.NotebookNode
    seconds: float = 0.0


def text_of(cell: nbformat.NotebookNode) -> str:
    """Return the text that a code cell put out, errors included, without colours."""
    parts = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append("\n".join(output.traceback) + "\n")
        else:
            parts.append(output.data.get("text/plain", "") + "\n")
    return without_codes("".join(parts))


def without_codes(text: str) -> str:
    """Return `text` without a terminal's codes for colours and the like."""
    return _TERMINAL_CODES.sub("", text)


def _titles(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Cell id → the last heading at or above that cell."""
    title, titles = "", {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#+ +(.+)$", cell.source, re.MULTILINE)
            title = headings[-1] if headings else title
        titles[cell.id] = title
    return titles


def execute(
    path: Path,
    *,
    before: Callable[[CellRun], Any] = lambda run: None,
    after: Callable[[CellRun], Any] = lambda run: None,
    timeout: float = 300,
) -> nbformat.NotebookNode:
    """Run the notebook at `path` in its own folder; return it with its outputs.

    `before` and `after` are called around each code cell. An error in a cell,
    or a cell that takes longer than `timeout` seconds, raises nbclient's
    `CellExecutionError` or `CellTimeoutError`; `after` has seen the cell by then.
    """
    notebook = nbformat.read(path, as_version=4)
    titles = _titles(notebook)
    code = [cell.id for cell in notebook.cells if cell.cell_type == "code"]
    runs: dict[str, CellRun] = {}
    started: dict[str, float] = {}

    def on_start(cell: nbformat.NotebookNode, **_: Any) -> None:
        if cell.cell_type != "code":
            return
        number = code.index(cell.id) + 1
        runs[cell.id] = CellRun(number, len(code), titles[cell.id], cell)
        started[cell.id] = time.perf_counter()
        before(runs[cell.id])

    def on_executed(cell: nbformat.NotebookNode, **_: Any) -> None:
        run = runs[cell.id]
        run.seconds = time.perf_counter() - started[cell.id]
        after(run)

    client = NotebookClient(
        notebook,
        kernel_manager_class=_ThisInterpreter,
        resources={"metadata": {"path": str(path.parent)}},
        timeout=timeout,
        on_cell_start=on_start,
        on_cell_executed=on_executed,
    )
    # client.execute() would leave its event loop open.
    return asyncio.run(client.async_execute())


def outputs_of(path: Path, patience: float) -> dict[str, str]:
    """Run a notebook whose cells wait for a click; return cell id → its text.

    Nobody clicks: its cell ``patience`` sets the deadline of the others.
    """

    def hurry(run: CellRun) -> None:
        if run.cell.id == "patience":
            run.cell.source = f"patience = {patience:g}"

    notebook = execute(path, before=hurry)
    return {c.id: text_of(c) for c in notebook.cells if c.cell_type == "code"}
