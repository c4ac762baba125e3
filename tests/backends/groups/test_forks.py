"""A process that a rank forks: it is told that the groups are its parent's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from tests.backends.backends import HOST_BACKENDS
from tests.backends.scripts import script

pytestmark = pytest.mark.processes

SAID = "was forked from rank"


def child(work: Callable[[], object]) -> tuple[int, str]:
    """Run `work` in a forked child; return its exit status, and what it has raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text, code = "nothing was raised", 7
        try:
            work()
        except SystemExit as error:
            text, code = "exit", int(error.code or 0)
        except BaseException as error:  # noqa: BLE001 - it is the answer
            text, code = f"{type(error).__name__}: {error}", 5
        os.write(writer, text.encode())
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said


def ops(group: dist.ProcessGroup, work: dist.Work) -> list[Callable[[], object]]:
    """Return what a child may try of its parent's groups."""
    x = np.ones(3)
    return [
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, group=group),
        lambda: work.wait(1),
        lambda: dist.send(x, 0),
        lambda: dist.recv(x, 0),
        lambda: dist.barrier(group),
        lambda: dist.all_gather_object([None] * 3, 1),
        lambda: dist.new_group([0, 1]),
        lambda: group.store.get("nothing"),
    ]


def forks(me: Rank, backend: str) -> None:
    """Rank 2 forks children that try everything; the parents' ops stay right."""
    dist.init_process_group(backend, timeout=60)
    group = dist.new_group([0, 1, 2])
    assert isinstance(group, dist.ProcessGroup)
    x = np.full(100, me.rank + 1.0)
    dist.all_reduce(x, group=group)
    hanging = np.ones(3)
    work = dist.all_reduce(hanging, async_op=True) if me.rank == 2 else None
    if work is not None:
        for op in ops(group, work):
            code, said = child(op)
            assert code == 5, said
            assert SAID in said or "belongs to the process that forked" in said, said
        # Neither its end, nor that of its groups, touches the parent's.
        assert child(dist.destroy_process_group)[0] in (5, 7)
        assert child(lambda: sys.exit(3)) == (3, "exit")
    me.meet("forked")
    if work is None:
        dist.all_reduce(hanging)
    else:
        assert work.wait(30)
    assert hanging.tolist() == [3, 3, 3]
    for number in range(5):
        x = np.full(1000, me.rank + number, np.float32)
        dist.all_reduce(x, group=group)
        assert (x == 3 + 3 * number).all()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_forked_child_is_told_so(backend: str) -> None:
    run_ranks(3, forks, backend)


ENDS = """
import os, sys, numpy as np, rankscope as dist
dist.init_process_group(timeout=60)
dist.barrier()
if dist.get_rank() == 1:
    pid = os.fork()
    if pid == 0:
        {end}
    print("the child's status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
x = np.ones(3)
dist.all_reduce(x)
print("the sum", x[0])
"""


def ends_itself(me: Rank, end: str) -> None:
    code, said = script(me, ENDS.format(end=end))
    assert code == 0, said
    assert "the sum 2.0" in said
    if me.rank == 1:
        status = 4 if "exit" in end else 1
        assert f"the child's status {status}" in said


@pytest.mark.parametrize("end", ["sys.exit(4)", "dist.barrier()"])
def test_a_forked_child_can_end(end: str) -> None:
    """It runs its exit handlers, after an error too; the parent goes on."""
    run_ranks(2, ends_itself, end)


def own_group(me: Rank) -> None:
    """A child may be a rank of a group of its own."""
    dist.init_process_group(timeout=60)
    dist.barrier()

    def work() -> None:
        dist.init_process_group(
            store=dist.HashStore(), rank=0, world_size=1, timeout=30
        )
        x = np.ones(3)
        dist.all_reduce(x)
        assert x[0] == 1
        dist.destroy_process_group()

    assert child(work) == (7, "nothing was raised")
    dist.barrier()
    dist.destroy_process_group()


def test_a_forked_child_makes_a_group_of_its_own() -> None:
    run_ranks(2, own_group)
