"""Rankscope: interactive, visible, recoverable collective communication.

``import rankscope as dist`` offers the names of ``torch.distributed``;
``%load_ext rankscope`` registers the notebook magics; :class:`Cluster` is
their Python twin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rankscope import backends
from rankscope.backends import *  # noqa: F403

if TYPE_CHECKING:
    from rankscope.engines import (
        Cluster,
        ClusterError,
        ExecutionError,
        Job,
        RankError,
    )
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


def __getattr__(name: str) -> Any:
    # A rank, or a plain script, needs neither ipyparallel nor IPython.
    if name in ("Cluster", "ClusterError", "ExecutionError", "Job", "RankError"):
        from rankscope import engines

        return getattr(engines, name)
    if name == "picture":
        from rankscope.widgets.picture import picture

        return picture
    if name == "torch":
        return importlib.import_module("rankscope.torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
