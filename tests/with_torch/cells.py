"""Cells on the ranks of a cluster, and what their variables are afterwards."""

from __future__ import annotations

import textwrap
from typing import Any

from rankscope.engines import Cluster

__all__ = ["WAIT", "run", "values"]

#: Seconds that a cell may take: two cores run all ranks, and import torch's parts.
WAIT = 60


def run(cluster: Cluster, code: str) -> None:
    """Run a cell on all ranks, to its end."""
    cluster.execute(textwrap.dedent(code)).result(WAIT)


def values(cluster: Cluster, code: str, *expressions: str) -> dict[int, list[Any]]:
    """Run a cell on all ranks; return rank → the values of `expressions` there.

    Without `expressions` the cell is one itself.
    """
    if not expressions:
        code, expressions = "", (code,)
    listed = ", ".join(expressions)
    run(cluster, f"{textwrap.dedent(code)}\n_found = [{listed}]")
    return cluster.pull("_found", timeout=WAIT)
