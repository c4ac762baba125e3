"""Processes that a cell forks, and threads that it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, Execution

pytestmark = pytest.mark.processes

WAIT = 60.0
POOLS = """
from multiprocessing import Pool
def divide(i): return 1 / (i - 2)
for _ in range(8):
    with Pool(2) as pool:
        try: pool.map(divide, range(5))
        except ZeroDivisionError: pass
"""
CHILD = """
import os, time, warnings
warnings.simplefilter("ignore")
pid = os.fork()
if pid == 0:
    {code}
else:
    {parent}
    print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as started:
        yield started


def printed(cell: Execution, rank: int = 0) -> str:
    streams = [one for one in cell.outputs(rank) if one["output_type"] == "stream"]
    return "".join(one["text"] for one in streams)


def test_pools_end(cluster: Cluster) -> None:
    cluster.execute(POOLS).result(WAIT)
    cluster.execute("dist.barrier()").result(WAIT)


@pytest.mark.parametrize(
    ("code", "parent", "status", "words"),
    [
        ("raise SystemExit(3)", "pass", 3, ""),
        ("import sys; sys.exit()", "pass", 0, ""),
        ("1 / 0", "pass", 1, "ZeroDivisionError: division by zero"),
        ("print('to its end')", "pass", 0, "to its end"),
        ("time.sleep(60)", "os.kill(pid, 15)", -15, ""),
    ],
    ids=["exit", "exit 0", "exception", "end", "SIGTERM"],
)
def test_a_child_ends_as_a_program_does(
    cluster: Cluster, code: str, parent: str, status: int, words: str
) -> None:
    program = CHILD.format(code=code, parent=parent)
    cell = cluster.execute(program).result(WAIT)
    until(lambda: words in printed(cell), WAIT, "the output of the child")
    assert f"status {status}" in printed(cell)
    assert "To exit" not in printed(cell)
    # It was no second engine: the next cell runs once, on the first one.
    assert printed(cluster.execute("print('once')").result(WAIT)).count("once") == 1


def test_the_output_of_a_process_is_shown(cluster: Cluster) -> None:
    cell = cluster.execute(
        "from multiprocessing import Process\n"
        "process = Process(target=print, args=(f'from rank {rank}',))\n"
        "process.start(); process.join(); assert process.exitcode == 0"
    ).result(WAIT)
    for rank in range(2):
        until(lambda: f"from rank {rank}" in printed(cell, rank), WAIT, "its output")  # noqa: B023
