"""Cells on the ranks of a cluster, and what their variables are afterwards."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rankscope.engines import Cluster

__all__ = ["WAIT", "run", "two_that_report", "values"]

#: Seconds that a cell may take: two cores run all ranks, and import torch's parts.
WAIT = 60


@contextmanager
def two_that_report(
    folders: pytest.TempPathFactory, begin: str, torch: str, **options: Any
) -> Iterator[Cluster]:
    """Two ranks of torch, which write reports, and have run the cell `begin`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKSCOPE_REPORT", str(folders.mktemp("reports")))
        with Cluster.start(2, torch=torch, **options) as started:
            run(started, begin)
            yield started


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
