"""The backend ``rankscope`` on the ranks of a cluster: cells, abort, a killed rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster, ExecutionError
from tests.with_torch.cells import WAIT, run, two_that_report, values

pytestmark = pytest.mark.in_order

BEGIN = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import rankscope.torch
    import backend_training as training

    def begin(**options):
        global model, optimizer
        model = training.DistributedDataParallel(
            training.Net(), bucket_cap_mb=0.01, **options)
        optimizer = training.adam(model)

    def train(steps):
        global done
        for step in range(done, done + steps):
            training.do_step(model, optimizer, training.own(step))
            done += 1

    done = 0
"""


@pytest.fixture(scope="module")
def cluster(
    _module_leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two ranks with torch over Rankscope, which write reports."""
    with two_that_report(
        tmp_path_factory, BEGIN, "rankscope", backend="tcp", timeout=77
    ) as started:
        yield started


def hang(cluster: Cluster, rank: int) -> Callable[[], str]:
    """Begin a step on `rank` alone; return what waits for its error and returns it."""
    hanging = cluster.execute(f"if rank == {rank}:\n    train(1)")

    def in_flight() -> bool:
        groups = cluster.status(fresh=True).ranks[rank].groups
        return bool(groups[0].in_flight)

    until(in_flight, WAIT)

    def error() -> str:
        with pytest.raises(ExecutionError) as caught:
            hanging.result(WAIT)
        return str(caught.value)

    return error


def issued(cluster: Cluster) -> int:
    (group,) = cluster.status(fresh=True).ranks[0].groups
    assert group.issued is not None
    return group.issued


def end_as_in_one_process(cluster: Cluster, code: str, steps: int) -> None:
    code += "\ndone = rankscope.torch.rejoin(model, optimizer)\ntrain(2)"
    found = values(cluster, code, "done", "training.difference(model.module, done)")
    assert [done for done, _ in found.values()] == [steps] * 2
    assert max(apart for _, apart in found.values()) <= 1e-6


def test_torchs_default_group_is_that_of_rankscope(cluster: Cluster) -> None:
    expressions = "dist.__name__", "dist.get_backend()", "dist.get_world_size()"
    found = values(cluster, "", *expressions)
    assert found == {rank: ["torch.distributed", "rankscope", 2] for rank in (0, 1)}
    (group,) = cluster.status().ranks[0].groups
    assert (group.name, group.library, group.timeout) == ("default", "", 77)


def test_an_op_is_on_the_board_once(cluster: Cluster) -> None:
    before = issued(cluster)
    code = "x, y = torch.ones(1), np.ones(1)\ndist.all_reduce(x)"
    found = values(cluster, f"{code}\nrankscope.all_reduce(y)", "x.item()", "y[0]")
    assert found == {0: [2, 2], 1: [2, 2]}
    assert issued(cluster) == before + 2


def test_an_abort_from_the_board_ends_a_backward_and_the_model_trains_on(
    cluster: Cluster,
) -> None:
    run(cluster, "begin()\ntrain(2)")
    error = hang(cluster, 0)
    cluster.abort(reason="a branch that rank 1 does not take")
    text = error()
    assert "DistAbortedError: all_reduce #" in text
    assert "a branch that rank 1 does not take" in text
    cluster.rebuild()
    end_as_in_one_process(cluster, "", 4)


def test_a_cell_rebuilds_the_group_itself(cluster: Cluster) -> None:
    error = hang(cluster, 1)
    cluster.abort()
    assert "DistAbortedError" in error()
    end_as_in_one_process(cluster, "rankscope.torch.rebuild()", 6)


def kill(cluster: Cluster, rank: int) -> None:
    """Kill a rank that another one waits for; start it again."""
    error = hang(cluster, 1 - rank)
    pid = cluster.status().ranks[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert f"rank {rank} is dead: killed by SIGKILL" in error()
    cluster.restart([rank])
    cluster.rebuild()


def replace_killed(cluster: Cluster, rank: int, steps: int) -> None:
    kill(cluster, rank)
    for code in BEGIN, "begin(init_sync=False)":
        cluster.execute(code, ranks=[rank]).result(WAIT)
    end_as_in_one_process(cluster, "", steps)


MAKE = """
    from torch.distributed.device_mesh import init_device_mesh
    pair = dist.new_group([0, 1])
    inner = init_device_mesh(
        "cpu", (1, 2), mesh_dim_names=("outer", "inner")).get_group("inner")
"""
USE = "x = torch.ones(1)\nfor group in pair, inner: dist.all_reduce(x, group=group)"


def refused(cluster: Cluster, code: str, rank: int) -> str:
    with pytest.raises(ExecutionError) as caught:
        cluster.execute(code, ranks=[rank]).result(WAIT)
    return str(caught.value)


def test_a_killed_rank_is_replaced_and_the_others_train_on(cluster: Cluster) -> None:
    run(cluster, MAKE)
    replace_killed(cluster, 1, 8)
    text = (
        "all_reduce in group 'ranks 0-1' on rank 0: rank 1 was started again, and has "
    )
    assert text + "not made this group of ranks 0–1" in refused(cluster, USE, 0)
    code = "pair = inner = dist.new_group([0, 1])\n"
    assert values(cluster, code + USE, "x.item()") == {0: [4], 1: [4]}


def test_rank_0_is_replaced_too_and_gets_the_groups_of_the_others(
    cluster: Cluster,
) -> None:
    """It has had torch's store, without which the others make groups later."""
    cluster.execute(MAKE, ranks=[0]).result(WAIT)
    cluster.execute(MAKE, ranks=[1]).result(WAIT)
    assert values(cluster, USE, "x.item()") == {0: [4], 1: [4]}
    kill(cluster, 0)
    assert "first gets the groups that the others have" in refused(cluster, MAKE, 1)
    names = "pair.group.group_desc", "inner.group.group_desc"
    expected = values(cluster, "if rank == 0: pair = inner = dist.group.WORLD", *names)[
        1
    ]
    for _ in range(2):
        cluster.execute("pair = dist.new_group([0, 1])", ranks=[0]).result(WAIT)
    cluster.execute(MAKE, ranks=[0]).result(WAIT)
    assert values(cluster, "", *names) == dict.fromkeys((0, 1), expected)
    assert values(cluster, USE, "x.item()") == {0: [4], 1: [4]}
    for code in BEGIN, "begin(init_sync=False)":
        cluster.execute(code, ranks=[0]).result(WAIT)
    end_as_in_one_process(cluster, "", 10)
    run(cluster, MAKE)
    run(cluster, USE)


def test_the_default_group_outlives_torchs(cluster: Cluster) -> None:
    code = """
        dist.destroy_process_group()
        dist.init_process_group("rankscope", store=dist.HashStore(), rank=rank,
                                world_size=world_size)
        x = torch.ones(1)
        dist.all_reduce(x)
    """
    assert values(cluster, code, "x.item()") == {0: [2], 1: [2]}
    cluster.restart()
    code = "x = torch.ones(1)\ndist.all_reduce(x)"
    assert values(cluster, code, "x.item()") == {0: [2], 1: [2]}
