"""What a cell says beside what it prints: warnings, and ops without a waiter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, Execution

pytestmark = pytest.mark.processes

WAIT = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as started:
        yield started


def said(cell: Execution, rank: int = 0) -> str:
    return "".join(one.get("text", "") for one in cell.outputs(rank))


def test_a_work_that_was_dropped(cluster: Cluster) -> None:
    cell = cluster.execute(
        "x = np.ones(2)\ndist.all_reduce(x, async_op=True)\ndist.barrier()", cell=5
    ).result(WAIT)
    text = "nobody waited for cell 5 line 2 `all_reduce`: the result may not"
    for rank in range(2):
        until(lambda: text in said(cell, rank), WAIT, "the sentence")  # noqa: B023


@pytest.mark.parametrize(
    "code",
    [
        "dist.all_reduce(x, async_op=True).wait()",
        "work = dist.all_reduce(x, async_op=True)",
        "dist.all_reduce(x)",
        "dist.all_reduce(x, async_op=True).get_future().wait()",
        "if rank == 0: dist.isend(x, 1)\nelse: dist.recv(x, 0)",
    ],
)
def test_what_is_no_fault(cluster: Cluster, code: str) -> None:
    cell = cluster.execute(f"x = np.ones(2)\n{code}\ndist.barrier()").result(WAIT)
    assert said(cell) == said(cell, 1) == ""
    cluster.execute("globals().pop('work', None) and None").result(WAIT)


def test_a_warning_names_the_cell(cluster: Cluster) -> None:
    code = "import warnings\nwarnings.warn('beware', stacklevel=1)"
    cell = cluster.execute(code, cell=7).result(WAIT)
    text = (
        "cell 7 line 2: UserWarning: beware\n  warnings.warn('beware', stacklevel=1)\n"
    )
    for rank in range(2):
        until(lambda: said(cell, rank) == text, WAIT, "the warning")  # noqa: B023
