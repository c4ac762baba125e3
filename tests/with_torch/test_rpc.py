"""torch's RPC and distributed autograd in cells: calls, hangs, ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.verdicts import Fault
from rankscope.engines import Cluster, Execution, ExecutionError
from rankscope.engines.status import OpStatus
from tests.with_torch.cells import WAIT, run, values

SETUP = """\
import threading
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer
def init():
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
gate = threading.Event()
def block():
    gate.wait()
    return rank
def nested():
    return rpc.rpc_sync("worker2", block)
def double(x):
    return 2 * x
def ring(left):
    if left:
        return rpc.rpc_sync(f"worker{(rank + 1) % 3}", ring, args=(left - 1,))
    gate.wait()
"""

#: The lines of `SETUP`: of `gate.wait()` in `block` and in `ring`, of the nested call.
BLOCKED, RING, NESTED = 9, 18, 12


@pytest.fixture(scope="module")
def started(_module_leaves_nothing: None) -> Iterator[Cluster]:
    """Three ranks of torch with RPC, which torch can begin once in a process."""
    with Cluster.start(3, torch="gloo") as cluster:
        cluster.execute(SETUP, cell=1).result(WAIT)
        run(cluster, "init()")
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The three ranks; no function runs on them afterwards."""
    run(started, "gate.clear()")
    yield started
    started.interrupt()
    until(lambda: all(r.cell is None for r in started.status(fresh=True).ranks), WAIT)
    run(started, "gate.set()")
    until(lambda: not any(op_of(started, rank) for rank in range(3)), WAIT)


def op_of(cluster: Cluster, rank: int) -> OpStatus | None:
    """Return what `rank` does in the group of the workers."""
    group = cluster.status(fresh=True).ranks[rank].group("rpc")
    return None if group is None else group.oldest


def hanging(cluster: Cluster, call: str, callee: int) -> Execution:
    """Run a cell in which rank 0 waits; return once `callee` runs the function."""
    execution = cluster.execute(f"if rank == 0:\n    {call}", cell=3)
    until(
        lambda: (op := op_of(cluster, callee)) is not None and op.op.startswith("run "),
        WAIT,
        "the function to run",
    )
    return execution


def interrupt(cluster: Cluster, execution: Execution) -> None:
    """Interrupt the cell, and wait for its end."""
    cluster.interrupt()
    with pytest.raises(ExecutionError) as caught:
        execution.result(WAIT)
    assert "KeyboardInterrupt" in str(caught.value)


def test_calls_return(cluster: Cluster) -> None:
    code = """
        to = f"worker{(rank + 1) % 3}"
        x = torch.ones(2)
        found = [
            rpc.rpc_sync(to, torch.add, args=(x, rank)),
            rpc.rpc_sync(to, double, args=(x,)),
            rpc.rpc_async(to, double, args=(x,)).wait(),
            rpc.rpc_async(to, double, args=(x,)).then(lambda f: f.value() + 1).wait(),
            rpc.remote(to, double, args=(x,)).to_here(),
            torch.futures.wait_all([rpc.rpc_async(to, double, args=(x,))])[0],
        ]
        dist.barrier()
    """
    found = values(cluster, code, "[one[0].item() for one in found]")
    for rank in range(3):
        assert found[rank] == [[rank + 1, 2, 2, 3, 2, 2]]
    assert cluster.status(fresh=True).groups["rpc"] == [0, 1, 2]


def test_an_error_of_the_function_arrives(cluster: Cluster) -> None:
    execution = cluster.execute(
        "if rank == 0:\n    rpc.rpc_sync('worker1', double, args=(None,))"
    )
    with pytest.raises(ExecutionError, match="TypeError") as caught:
        execution.result(WAIT)
    assert set(caught.value.errors) == {0}
    until(lambda: op_of(cluster, 1) is None, WAIT, "the function to end")


def test_distributed_autograd_and_optimizer(cluster: Cluster) -> None:
    code = """
        weight = torch.ones(2, requires_grad=True)
        def parameter():
            return rpc.RRef(weight)
        def forward(x):
            return weight * x
        dist.barrier()
        after = None
        if rank == 0:
            rrefs = [rpc.rpc_sync(f"worker{n}", parameter) for n in (1, 2)]
            optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.5)
            with dist_autograd.context() as context:
                parts = [
                    rpc.rpc_async(f"worker{n}", forward, args=(torch.ones(2) * n,))
                    for n in (1, 2)
                ]
                loss = sum(part.wait().sum() for part in parts)
                dist_autograd.backward(context, [loss])
                optimizer.step(context)
            after = [rref.to_here().tolist() for rref in rrefs]
        dist.barrier()
    """
    found = values(cluster, code, "after", "weight.tolist()")
    assert found[0][0] == [[0.5, 0.5], [0.0, 0.0]]
    assert found[1][1] == [0.5, 0.5]
    assert found[2][1] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("call", "op"),
    [
        ("rpc.rpc_sync('worker1', block)", "rpc_sync to worker1"),
        ("rpc.rpc_async('worker1', block).wait()", "rpc_async to worker1"),
        ("rpc.remote('worker1', block).to_here()", "to_here from worker1"),
        (
            "torch.futures.wait_all([rpc.rpc_async('worker1', block)])",
            "rpc_async to worker1",
        ),
    ],
)
def test_a_wait_is_shown_and_interrupted(cluster: Cluster, call: str, op: str) -> None:
    execution = hanging(cluster, call, 1)
    waiting, running = op_of(cluster, 0), op_of(cluster, 1)
    assert waiting is not None
    assert running is not None
    assert (waiting.op, waiting.source) == (op, "cell 3 line 2")
    assert running.op == "run block"
    until(
        lambda: (now := op_of(cluster, 1)) and now.source == f"cell 1 line {BLOCKED}",
        WAIT,
        "the line of the function",
    )
    if "wait_all" not in call:
        (verdict,) = until(lambda: cluster.diagnose(stall=0.5), WAIT, "a verdict")
        assert verdict.fault is Fault.UNANSWERED_RPC
        assert (verdict.culprits, verdict.waiting) == ((1,), (0,))
        assert f"rank 0 waits in cell 3 line 2 `{op}` for `block`" in str(verdict)
        assert f"rank 1 runs `block`, at cell 1 line {BLOCKED}" in str(verdict)
    interrupt(cluster, execution)
    # RPC is usable afterwards.
    assert values(cluster, "rpc.rpc_sync('worker1', double, args=(2,))")[0] == [4]


def test_nested_calls_lead_to_the_last_worker(cluster: Cluster) -> None:
    execution = hanging(cluster, "rpc.rpc_sync('worker1', nested)", 2)
    (verdict,) = until(lambda: cluster.diagnose(stall=0.5), WAIT, "a verdict")
    assert (verdict.culprits, verdict.waiting) == ((2,), (0, 1))
    said = str(verdict)
    assert "rank 0 waits in cell 3 line 2 `rpc_sync to worker1` for `nested`" in said
    where = f"cell 1 line {NESTED}"
    assert f"rank 1 waits in {where} `rpc_sync to worker2` for `block`" in said
    assert "rank 2 runs `block`" in said
    # An abort ends the waits of all threads, and says what they waited for.
    cluster.abort("rpc", "by the test", verdicts=[verdict])
    with pytest.raises(ExecutionError) as caught:
        execution.result(WAIT)
    assert "rpc_sync to worker1 on rank 0 was aborted: by the test" in str(caught.value)
    assert "rank 2 runs `block`" in str(caught.value)
    until(lambda: op_of(cluster, 1) is None, WAIT, "rank 1 to go on")
    cluster.rebuild()


def test_a_call_that_comes_back(cluster: Cluster) -> None:
    execution = cluster.execute(
        "if rank == 0:\n    rpc.rpc_sync('worker1', ring, args=(3,))", cell=3
    )
    end = f"rank 1 runs `ring`, at cell 1 line {RING}"
    until(
        lambda: any(
            end in str(one) and str(one).count("for `ring`") == 4
            for one in cluster.diagnose(stall=0.5)
        ),
        WAIT,
        "a verdict that leads through all ranks",
    )
    interrupt(cluster, execution)


def _init_with_one_late(cluster: Cluster) -> None:
    """Have rank 2 call `init_rpc` when the others wait for it."""
    execution = cluster.execute("if rank != 2:\n    init()", cell=4)
    until(lambda: op_of(cluster, 0) and op_of(cluster, 1), WAIT, "the ranks to wait")
    (verdict,) = until(lambda: cluster.diagnose(stall=0.5), WAIT, "a verdict")
    assert verdict.culprits == (2,)
    assert "rank 2 did not call init_rpc" in str(verdict)
    cluster.execute("init()", ranks=[2]).result(WAIT)
    execution.result(WAIT)


@pytest.mark.parametrize("alone", [0, 1], ids=["host", "client"])
def test_an_init_that_was_interrupted_leaves_nothing(alone: int) -> None:
    with Cluster.start(2, torch="gloo") as cluster:
        cluster.execute(SETUP, cell=1).result(WAIT)
        for _ in range(2):
            execution = cluster.execute(f"if rank == {alone}:\n    init()", cell=4)
            until(lambda: op_of(cluster, alone), WAIT, "the rank to wait")
            interrupt(cluster, execution)
        began = time.monotonic()
        execution = cluster.execute(f"if rank == {alone}:\n    init()", cell=5)
        until(lambda: op_of(cluster, alone), WAIT, "the rank to wait")
        cluster.abort("rpc")
        with pytest.raises(ExecutionError, match="init_rpc"):
            execution.result(WAIT)
        assert time.monotonic() - began < WAIT
        run(cluster, "init()")
        found = values(cluster, "rpc.rpc_sync(f'worker{1 - rank}', double, args=(1,))")
        assert found == {0: [2], 1: [2]}
        run(cluster, "rpc.shutdown()")


def test_the_host_may_begin_anew_while_another_worker_waits_in_its_store() -> None:
    with Cluster.start(3, torch="gloo") as cluster:
        cluster.execute(SETUP, cell=1).result(WAIT)
        waiting = cluster.execute("init()", ranks=[1], cell=4)
        given_up = cluster.execute("init()", ranks=[0], cell=4)
        until(lambda: op_of(cluster, 0) and op_of(cluster, 1), WAIT, "both to wait")
        cluster.interrupt([0])
        with pytest.raises(ExecutionError, match="KeyboardInterrupt"):
            given_up.result(WAIT)
        again = cluster.execute("init()", ranks=[0, 2], cell=5)
        again.result(WAIT)
        waiting.result(WAIT)
        run(cluster, "rpc.shutdown()")


def test_a_worker_that_is_late_and_one_that_dies() -> None:
    with Cluster.start(3, torch="gloo") as cluster:
        cluster.execute(SETUP, cell=1).result(WAIT)
        _init_with_one_late(cluster)
        execution = hanging(cluster, "rpc.rpc_sync('worker1', block)", 1)
        os.kill(cluster.status().ranks[1].pid, signal.SIGKILL)
        with pytest.raises(ExecutionError) as caught:
            execution.result(WAIT)
        assert "rpc_sync to worker1" in str(caught.value)
        assert "rank 1" in str(caught.value)
        until(lambda: cluster.status().dead == [1], WAIT, "the death")
        # The others still have each other, and none waits for the dead one at the end.
        code = "found = rpc.rpc_sync(f'worker{2 - rank}', double, args=(rank,))"
        cluster.execute(code, ranks=[0, 2]).result(WAIT)
        began = time.monotonic()
        with pytest.raises(ExecutionError, match="worker1"):
            cluster.execute("rpc.shutdown()", ranks=[0, 2]).result(WAIT)
        assert time.monotonic() - began < WAIT
        cluster.restart([1])
        cluster.execute(SETUP, cell=1).result(WAIT)
        run(cluster, "init()")
        found = values(cluster, "rpc.rpc_sync('worker1', double, args=(rank,))")
        assert found == {0: [0], 1: [2], 2: [4]}
        # RPC is not rebuilt; the groups of torch are.
        cluster.rebuild()
        run(cluster, "dist.barrier()\nrpc.shutdown()")
