"""Rankscope: interactive, visible, recoverable collective communication.

``import rankscope as dist`` offers the names of ``torch.distributed``;
``%load_ext rankscope`` registers the notebook magics; :class:`Cluster` is
their Python twin.
"""

from __future__ import annotations

import importlib
from os.path import abspath, dirname, isdir
from typing import TYPE_CHECKING, Any

# Python that starts in a checkout takes this folder for the installed package; what
# the wheel has inside of it is beside it here.
if not isdir(f"{dirname(abspath(__file__))}/backends"):
    __path__.append(dirname(dirname(abspath(__file__))))

from rankscope import backends
from rankscope.backends.first_use import at_first_use
from rankscope.backends.groups import unattended as _unattended

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.backends import *  # noqa: F403
    from rankscope.engines import Cluster, ClusterError, ExecutionError, Job, RankError
    from rankscope.widgets.picture import picture

__version__ = "0.1.0"

__all__ = [
    *backends.__all__,
    "Cluster",
    "ClusterError",
    "ExecutionError",
    "Job",
    "RankError",
    "load_ipython_extension",
    "picture",
]


def _before_init(rank: int, world_size: int, init_method: str | None) -> None:
    # A process that only reads, or looks on, does without it.
    from rankscope.hang_reports import begin

    begin(rank, world_size, init_method)


def _write_page(report: Any, folder: Path) -> None:
    # Only a job that hangs needs it.
    from rankscope.widgets.report.page import write_page

    write_page(report, str(folder), folder / "report.html")


_unattended.before_init.append(_before_init)
_unattended.page_writers.append(_write_page)

#: What a rank, or a plain script, does not need: ipyparallel, IPython and matplotlib.
_AT_FIRST_USE = {
    **dict.fromkeys(
        ("Cluster", "ClusterError", "ExecutionError", "Job", "RankError"), "engines"
    ),
    "picture": "widgets.picture",
    **dict.fromkeys(backends.__all__, "backends"),
}


_imported, __dir__, _ = at_first_use(__name__, _AT_FIRST_USE)


def __getattr__(name: str) -> Any:
    if name == "torch":
        return importlib.import_module("rankscope.torch")
    return _imported(name)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics: what ``%load_ext rankscope`` calls.

    Parameters
    ----------
    shell : IPython.core.interactiveshell.InteractiveShell
        The shell of the notebook or terminal.

    Examples
    --------
    In a notebook::

        %load_ext rankscope
        %dist_init -n 4
    """
    from rankscope.magics import load_ipython_extension as load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics away again: what ``%unload_ext rankscope`` calls."""
    from rankscope.magics import unload_ipython_extension as unload

    unload(shell)
