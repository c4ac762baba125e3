"""Torch's groups and their ops as the world shows them, from real processes."""

from __future__ import annotations

from functools import partial

from rankscope.backends.conformance.waiting import until
from tests.with_torch.ranks import Ranks


def is_completed(ranks: Ranks, rank: int, seq: int) -> bool:
    """Return whether the last op that the rank has completed is number `seq`."""
    last = ranks.groups(rank)["default_pg"].completed
    return last is not None and last.seq == seq


def test_a_group_shows_what_it_did(ranks: Ranks) -> None:
    ranks.run("for _ in range(3): dist.all_reduce(x)")
    for rank in range(2):
        assert ranks.ask(rank, "watch().rank, watch().world_size") == (rank, 2)
        # Gloo's thread may note the end of an op after the call has returned.
        until(partial(is_completed, ranks, rank, 3))
        group = ranks.groups(rank)["default_pg"]
        assert group.library == "torch"
        assert group.ranks == (0, 1)
        # Where torch is built for GPUs, gloo has those, too.
        assert group.devices["cpu"] == "gloo"
        assert group.state == "ready"
        assert group.timeout == 1800
        assert group.in_flight == 0
        assert group.issued == 3
        assert group.completed.op == "all_reduce"
        assert group.completed.seq == 3
        assert group.completed.nbytes == 48
        assert group.completed.sizes == ((4, 3),)
        assert group.completed.dtypes == ("float32",)
        assert 0 < (group.completed.duration or 0) < 10
        assert group.completed.source.startswith("cell")


def test_an_op_in_flight_shows_its_line_and_how_long_it_runs(ranks: Ranks) -> None:
    ranks.start({0: "dist.broadcast(x, src=1)"})
    ranks.wait_for_ops("default_pg", [0])
    first = ranks.groups(0)["default_pg"].oldest
    second = ranks.groups(0)["default_pg"].oldest
    assert (first.op, first.seq, first.state) == ("broadcast", 1, "started")
    assert first.peer == 1
    assert first.timeout == 1800
    assert first.source.startswith("cell")
    assert first.source.endswith(":1")
    assert 0 < (first.elapsed or 0) < (second.elapsed or 0)
    ranks.run({1: "dist.broadcast(x, src=1)"})
    assert ranks.finish([0]) == {}
    until(lambda: ranks.groups(0)["default_pg"].oldest is None)


REUSED = """
group, options = dist.distributed_c10d._get_default_group(), dist.AllreduceOptions()
for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
    options.reduceOp = op
    group.allreduce([x], options).wait()
dist.reduce(x, 1, op=dist.ReduceOp.PRODUCT)
dist.all_gather([torch.ones(2, 2), torch.ones(2, 2)], torch.ones(2, 2))
outer = dist.all_reduce
def inner():
    outer(x)
inner()
"""


def test_each_call_is_told_as_it_was_made(ranks: Ranks) -> None:
    ranks.run(REUSED)
    until(partial(is_completed, ranks, 0, 5))
    records = ranks.ask(0, "local_dump()")["records"]
    told = [(one["op"], one["reduce_op"], one["peer"]) for one in records]
    assert told == [
        ("all_reduce", "max", None),
        ("all_reduce", "min", None),
        ("reduce", "product", 1),
        ("all_gather", None, None),
        ("all_reduce", "sum", None),
    ]
    assert records[3]["sizes"] == [[2, 2], [2, 2, 2]]
    lines = [
        [place["line"] for place in (one["frame"], *one["callers"])] for one in records
    ]
    assert lines == [[5], [5], [6], [7], [10, 11]]


def test_torch_has_its_own_methods_after_the_watch(ranks: Ranks) -> None:
    ranks.run(
        "calls = watch().calls\n"
        "calls.remove()\n"
        "dist.all_reduce(x)\n"
        "calls.install()\n"
        "dist.all_reduce(x)\n"
    )


STEP = """
from torch.nn.parallel import DistributedDataParallel as DDP
from rankscope.backends.torch_watch.errors import explain
model = DDP(torch.nn.Linear(4, 4), broadcast_buffers=False)
def step():
    model(torch.ones(2, 4)).sum().backward()
step()
"""

CAUGHT = """
try:
    step()
    raise AssertionError("no error")
except RuntimeError as error:
    explain(error)
"""


def test_an_op_of_ddp_whose_peer_dies_has_failed() -> None:
    """For gloo, torch's recorder has the op as retired: only the error tells."""
    with Ranks(2) as ranks:
        ranks.init()
        ranks.run(STEP)
        before = len(ranks.ask(0, "local_dump()")["records"])
        ranks.start({0: CAUGHT})
        until(lambda: ranks.groups(0)["default_pg"].oldest is not None)
        ranks.start({1: "os._exit(1)"})
        assert ranks.finish([0]) == {}
        *earlier, last = ranks.ask(0, "local_dump()")["records"]
        assert len(earlier) >= before
        assert last["state"] == "failed"
        assert "Connection closed by peer" in last["error"]
        assert {one["state"] for one in earlier[:before]} == {"completed"}
        completed = ranks.groups(0)["default_pg"].completed
        assert completed.seq < last["collective_seq_id"]
