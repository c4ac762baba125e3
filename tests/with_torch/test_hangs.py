"""Torch's groups on a real cluster: shown, diagnosed, aborted by name."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.verdicts import Fault
from rankscope.engines import Cluster, ClusterError, Execution, ExecutionError
from rankscope.magics import use_cluster
from rankscope.magics.complete import candidates, kinds_of_values
from rankscope.magics.session import session
from rankscope.widgets.board.model import BoardModel
from tests.with_torch.cells import WAIT, run, values

#: Rank 2 leaves the collective out; the others wait in line 2.
HANG = """\
if rank != 2:
    dist.all_reduce(x)
else:
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def started(_module_leaves_nothing: None) -> Iterator[Cluster]:
    """Three ranks of torch, of which two have a group ``tp``."""
    with Cluster.start(3, torch="gloo", timeout=300) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The three ranks with fresh groups of torch."""
    code = f"""
        import threading
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            init_method="tcp://127.0.0.1:{_free_port()}",
            rank=rank,
            world_size=world_size,
        )
        tp = dist.new_group([0, 1], group_desc="tp")
        x = torch.ones(1000)
    """
    run(started, code)
    yield started
    started.abort()
    started.interrupt()
    until(lambda: all(r.cell is None for r in started.status(fresh=True).ranks), WAIT)


def _free_port() -> int:
    """Return an unused port: torch reads the keys of earlier groups at a used one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def hanging(cluster: Cluster) -> Execution:
    """Run a cell that hangs on ranks 0 and 1; return once it does."""
    execution = cluster.execute(HANG, cell=7)
    until(lambda: in_flight(cluster) == [0, 1], WAIT, "the collective to hang")
    return execution


def in_flight(cluster: Cluster) -> list[int]:
    """Return the ranks with an op in flight on the default group of torch."""
    return [
        one.rank
        for one in cluster.status(fresh=True).ranks
        for group in one.groups
        if group.name == "default_pg" and group.oldest is not None
    ]


def test_the_groups_are_shown_as_those_of_torch(cluster: Cluster) -> None:
    status = cluster.status(fresh=True)
    assert status.groups == {"default_pg": [0, 1, 2], "tp": [0, 1]}
    assert {group.library for one in status.ranks for group in one.groups} == {"torch"}
    labels = [tab["label"] for tab in BoardModel.of(status).tabs()]
    assert labels == ["default_pg · torch", "tp · torch"]


def test_a_cell_cannot_have_a_group_of_torch_as_default(cluster: Cluster) -> None:
    with pytest.raises(ClusterError) as caught:
        cluster.execute("1", group="tp")
    message = str(caught.value)
    assert "group 'tp' is torch's" in message
    assert "-r 0-1" in message


def test_a_hang_is_diagnosed_and_aborted(cluster: Cluster) -> None:
    execution = hanging(cluster)
    (verdict,) = until(lambda: cluster.diagnose(stall=0.5), WAIT, "a verdict")
    assert verdict.culprits == (2,)
    assert verdict.waiting == (0, 1)
    assert verdict.fault in (Fault.MISSING_RANKS, Fault.RANK_BUSY_ELSEWHERE)
    assert "cell 7 line 2" in str(verdict)
    aborting = time.monotonic()
    cluster.abort("default_pg", "by the test")
    until(lambda: execution.ranks_running == [2], WAIT, "ranks 0 and 1 to end")
    assert time.monotonic() - aborting < 5
    assert set(execution.errors) == {0, 1}
    cluster.interrupt([2])
    with pytest.raises(ExecutionError):
        execution.result(WAIT)
    states = {
        (one.rank, group.name): group.state
        for one in cluster.status(fresh=True).ranks
        for group in one.groups
    }
    assert {state for (_, name), state in states.items() if name == "tp"} == {"ready"}
    assert {states[rank, "default_pg"] for rank in range(3)} == {"aborted"}
    # The processes, and what they computed, live on.
    assert values(cluster, "x.sum().item() > 0") == {rank: [True] for rank in range(3)}


def test_the_magics_take_groups_of_torch_by_name(
    cluster: Cluster, ipython: InteractiveShell
) -> None:
    use_cluster(cluster)
    try:
        kinds = kinds_of_values(ipython)
        # Completion asks no rank: it offers what the ranks reported last.
        until(
            lambda: candidates("%dist_abort def", 0, kinds) == ("def", ["default_pg"]),
            WAIT,
            "the group to be offered",
        )
        execution = hanging(cluster)
        with capture_output() as said:
            ipython.run_line_magic("dist_status", "")
        assert "default_pg · torch" in said.outputs[0].data["text/plain"]

        def diagnosed() -> str:
            with capture_output() as seen:
                ipython.run_line_magic("dist_diagnose", "")
            return seen.stdout if "cell 7" in seen.stdout else ""

        assert "rank 2" in until(diagnosed, WAIT, "a verdict")
        with capture_output() as said:
            ipython.run_line_magic("dist_abort", "default_pg")
        assert said.stdout.startswith("group 'default_pg' aborted")
        until(lambda: execution.ranks_running == [2], WAIT, "ranks 0 and 1 to end")
    finally:
        session.drop()


def test_a_program_that_imports_torch_itself_is_watched() -> None:
    with Cluster.start(2) as cluster:
        code = """
            import threading
            import torch
            import torch.distributed as td
            td.init_process_group("gloo")
            x = torch.ones(1000)
        """
        run(cluster, code)
        assert values(cluster, "dist is rankscope") == {0: [True], 1: [True]}
        groups = cluster.status(fresh=True).groups
        assert groups == {"default": [0, 1], "default_pg": [0, 1]}
        execution = cluster.execute(
            "td.all_reduce(x) if rank == 0 else threading.Event().wait()", cell=3
        )
        until(lambda: in_flight(cluster) == [0], WAIT, "the collective to hang")
        (verdict,) = until(lambda: cluster.diagnose(stall=0.5), WAIT, "a verdict")
        assert verdict.culprits == (1,)
        cluster.abort("default_pg")
        until(lambda: execution.ranks_running == [1], WAIT, "rank 0 to end")
        cluster.interrupt()
        with pytest.raises(ExecutionError):
            execution.result(WAIT)
        # Rankscope's own group is usable all the same.
        run(cluster, "y = np.ones(1)\ndist.all_reduce(y)\nassert y == 2")
