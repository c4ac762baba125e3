"""A hang of torch in a cell: aborted, explained, rebuilt, trained on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.verdicts import Verdict
from rankscope.engines import Cluster, ExecutionError
from tests.with_torch.cells import WAIT, run, two_that_report, values

MODEL = """
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tp = dist.new_group([0, 1], group_desc="tp")
    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(8, 4) * (rank + 1)).square().mean().backward()
            optimizer.step()
"""


@pytest.fixture(scope="module")
def cluster(
    _module_leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two ranks of torch, which write reports, shared by the tests of this module."""
    with two_that_report(tmp_path_factory, MODEL, "gloo") as started:
        yield started


def in_flight(cluster: Cluster, name: str, rank: int) -> bool:
    """Whether `rank` has an op of a group in flight."""
    known = cluster.status(fresh=True).ranks[rank].groups
    return any(one.in_flight for one in known if one.name == name)


def test_a_hang_in_backward_is_aborted_and_the_model_trains_on(
    cluster: Cluster,
) -> None:
    run(cluster, "train(2)")
    hanging = cluster.execute("if rank == 0:\n    train(1)")
    until(lambda: in_flight(cluster, "default_pg", 0), WAIT)
    began = time.monotonic()
    cluster.abort("default_pg", "a branch that rank 1 does not take")
    with pytest.raises(ExecutionError) as caught:
        hanging.result(WAIT)
    assert time.monotonic() - began < 5.0
    error = caught.value
    assert "DistAbortedError" in str(error)
    assert "a branch that rank 1 does not take" in str(error)
    cluster.rebuild()
    code = "train(2)\nx = torch.ones(1)\ndist.all_reduce(x, group=tp)"
    found = values(
        cluster, code, "[p.tolist() for p in model.parameters()]", "x.item()"
    )
    assert found[0] == found[1]
    assert found[0][1] == 2.0


def test_a_restarted_rank_joins_the_groups_of_the_others(cluster: Cluster) -> None:
    run(cluster, "kept = rank + 10")
    cluster.restart([1])
    cluster.rebuild()
    code = "x = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)"
    found = values(cluster, code, "x.item()", "globals().get('kept')")
    assert found == {0: [3.0, 10], 1: [3.0, None]}


def test_an_op_that_torch_gives_up_says_why_it_hung(cluster: Cluster) -> None:
    run(
        cluster,
        """
        from datetime import timedelta
        short = dist.new_group([0, 1], timedelta(seconds=6), group_desc="short")
        """,
    )
    cell = cluster.execute(
        "x = torch.ones(4)\n"
        "if rank == 0: dist.all_reduce(x, group=short)\n"
        "else: dist.broadcast(x, 0, group=short)",
        cell=9,
    )
    until(
        lambda: in_flight(cluster, "short", 0) and in_flight(cluster, "short", 1), WAIT
    )
    verdicts: list[Verdict] = []

    def found() -> bool:
        verdicts[:] = cluster.diagnose()
        return bool(verdicts)

    until(found, WAIT)
    # What the watch of a notebook does.
    cluster.tell_ranks(verdicts)
    assert cell.wait(WAIT)
    for rank, op in enumerate(("all_reduce", "broadcast")):
        error = cell.errors[rank]
        assert error.ename in ("DistTimeoutError", "DistBackendError")
        assert error.evalue.startswith(
            f"{op} #1 of torch's group 'short' on rank {rank} (cell 9 line "
        )
        assert "diagnosis at " in error.evalue
        assert " while rank 1 issued broadcast #1 (cell 9 line 3)" in error.evalue
        assert (error.op, error.sequence_number) == (op, 1)
    # The next cell hears nothing of it.
    run(cluster, "dist.barrier()")
    cell = cluster.execute("dist.all_reduce(x, group=short)")
    assert cell.wait(WAIT)
    assert "diagnosis" not in str(cell.errors)


def test_a_rank_that_comes_too_late_learns_who_has_timed_out(cluster: Cluster) -> None:
    run(
        cluster,
        """
        from datetime import timedelta
        late = dist.new_group([0, 1], timedelta(seconds=1), group_desc="late")
        """,
    )
    op = "dist.all_reduce(torch.ones(1), group=late)"
    first = cluster.execute(op, ranks=[0], cell=9)
    assert first.wait(WAIT)
    ended = time.monotonic()
    until(lambda: time.monotonic() > ended + 1.2, WAIT)
    second = cluster.execute(op, ranks=[1], cell=10)
    assert second.wait(WAIT)
    assert second.errors[1].ename == "DistBackendError"
    assert re.search(
        r"all_reduce #1 of torch's group 'late' on rank 1 \(cell 10 line 1\): .*; rank "
        r"0 timed out in all_reduce #1 \(cell 9 line 1\) after 1 s: it waited for "
        r"this rank, which came \d s later",
        second.errors[1].evalue,
    )


def test_a_rank_that_comes_too_late_to_ddp_learns_who_has_timed_out(
    cluster: Cluster,
) -> None:
    run(
        cluster,
        """
        from datetime import timedelta
        ddp = torch.nn.parallel.DistributedDataParallel
        # Imports. Kept: torch hangs where garbage collection ends a DDP in backward().
        warm = ddp(torch.nn.Linear(2, 1))
        warm(torch.ones(1, 2)).sum().backward()
        slow = dist.new_group([0, 1], timedelta(seconds=2), group_desc="slow")
        model = ddp(torch.nn.Linear(2, 1), process_group=slow)
        loss = model(torch.ones(1, 2)).sum()
        """,
    )
    first = cluster.execute("loss.backward()", ranks=[0], cell=9)
    assert first.wait(WAIT)
    second = cluster.execute("loss.backward()", ranks=[1], cell=10)
    assert second.wait(WAIT)
    assert re.search(
        r"rank 0 timed out in all_reduce #\d+ \(cell 9 line 1\) after \d+ s",
        second.errors[1].evalue,
    )


def test_a_rank_that_torch_ends_by_a_signal_has_the_cause(cluster: Cluster) -> None:
    cell = cluster.execute(
        "dist.all_reduce(torch.ones(6, dtype=(torch.float32, torch.float64)[rank]))",
        cell=11,
    )
    assert cell.wait(WAIT)
    dead = [rank for rank, one in cell.errors.items() if one.ename == "EngineDied"]
    assert dead
    for error in cell.errors.values():
        assert "killed by SIGABRT" in error.evalue
        assert "; diagnosis: rank 0 issued all_reduce #" in error.evalue
        assert error.culprits == (0, 1)
        assert (
            " (cell 11 line 1) with dtype float32, rank 1 with dtype float64"
        ) in error.evalue
    cluster.restart(dead)
    cluster.rebuild()
    run(cluster, "dist.barrier()")
