"""Verdicts on hangs of torch's groups, from real processes that hang."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest

from rankscope.backends.observe.verdicts import Fault, Verdict
from tests.with_torch.ranks import Ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture
def ranks(three: Ranks) -> Iterator[Ranks]:
    three.init()
    three.run("x = torch.ones(4)")
    yield three
    three.run("dist.destroy_process_group()")


def hang(
    ranks: Ranks, code: Mapping[int, str], group: str = "default_pg", op: str = ""
) -> list[Verdict]:
    """Return the verdicts on `group` while the ranks hang in `code`; end the hang."""
    ranks.start(code)
    ranks.wait_for_ops(group, code, op or None)
    verdicts = ranks.diagnose(group)
    for rank in range(ranks.count):
        ranks.ask(rank, "world.abort(None, 'the test is over')")
    assert set(ranks.finish(code)) == set(code)
    return verdicts


def test_a_missing_rank(ranks: Ranks) -> None:
    code = {0: "dist.all_reduce(x)", 2: "dist.all_reduce(x)"}
    (verdict,) = hang(ranks, code)
    assert verdict.fault is Fault.MISSING_RANKS
    assert verdict.culprits == (1,)
    assert verdict.waiting == (0, 2)
    assert (verdict.op, verdict.seq) == ("all_reduce", 1)
    group = ranks.groups(0)["default_pg"]
    assert group.state == "aborted"
    assert "the test is over" in str(group.reason)


@pytest.mark.parametrize(
    ("fault", "one", "other", "words"),
    [
        (
            Fault.OP_MISMATCH,
            "dist.broadcast(x, src=0)",
            "dist.all_reduce(x)",
            "while rank 2 issued all_reduce #1 ",
        ),
        (
            Fault.SIZE_MISMATCH,
            "dist.broadcast(x, src=0)",
            "dist.broadcast(torch.ones(9), src=0)",
            "rank 2 .*with 9 elements",
        ),
        (
            Fault.DTYPE_MISMATCH,
            "dist.broadcast(x, src=0)",
            "dist.broadcast(x.int(), src=0)",
            "rank 2 .*with dtype int32",
        ),
        (
            Fault.ROOT_MISMATCH,
            "dist.broadcast(x, src=0)",
            "dist.broadcast(x, src=1)",
            "rank 2 .*with root 1",
        ),
        (
            Fault.REDUCE_OP_MISMATCH,
            "dist.reduce(x, dst=1)",
            "dist.reduce(x, dst=1, op=dist.ReduceOp.MAX)",
            "rank 2 .*with reduce op max",
        ),
    ],
)
def test_a_mismatch(
    ranks: Ranks, fault: Fault, one: str, other: str, words: str
) -> None:
    # Rank 0 stays away: whether a mismatch alone hangs depends on gloo.
    (verdict,) = hang(ranks, {1: one, 2: other})
    assert verdict.fault is fault
    # Of two that differ, neither is known to be wrong.
    assert verdict.culprits == (1, 2)
    # The cells of the two ranks may have the same number.
    assert re.search(words, str(verdict))


def test_splits_that_disagree(ranks: Ranks) -> None:
    call = "dist.all_to_all_single(torch.empty(3), torch.ones(3))"
    uneven = call.replace("ones(3)", "ones(3), [1, 1, 1], [2, 0, 1]")
    (verdict,) = hang(ranks, {1: call, 2: uneven})
    assert verdict.fault is Fault.SPLIT_MISMATCH
    # A part that is too long would end the process, in gloo. Of rank 0, which has not
    # entered, it is not known what it expects.
    assert verdict.culprits == (1, 2)
    assert "rank 2 sends 0 rows to rank 1, which expects 1" in str(verdict)


def test_two_groups_in_different_orders(ranks: Ranks) -> None:
    ranks.run(
        "a = dist.new_group([0, 1], group_desc='a')\n"
        "b = dist.new_group([0, 1], group_desc='b')\n"
    )
    ranks.start({0: "dist.all_reduce(x, group=a)", 1: "dist.all_reduce(x, group=b)"})
    ranks.wait_for_ops("a", [0])
    ranks.wait_for_ops("b", [1])
    (verdict,) = ranks.diagnose("a")
    for rank in range(3):
        ranks.ask(rank, "world.abort(None, 'the test is over')")
    assert set(ranks.finish([0, 1])) == {0, 1}
    assert verdict.fault is Fault.DEADLOCK
    assert verdict.culprits == (0, 1)
    assert re.fullmatch(
        r"ranks 0–1 wait for each other: rank 0 in all_reduce #1 of group 'a' \(.*\) "
        r"for rank 1, rank 1 in all_reduce #1 of group 'b' \(.*\) for rank 0; "
        "issue the ops in one order on all ranks",
        str(verdict),
    )


def test_a_backward_of_ddp_that_one_rank_does_not_take(ranks: Ranks) -> None:
    ranks.run(
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        # The second forward exchanges the order of the buckets.
        "for _ in range(2): model(x).sum().backward()\n"
    )
    step = "loss = model(x).sum()\n\nloss.backward()"
    ranks.run({2: "gate = threading.Event()"})
    ranks.start({0: step, 1: step, 2: "gate.wait()"})
    ranks.wait_for_ops("default_pg", [0, 1], "all_reduce")
    for rank in (0, 1):
        # The reducer's ops have a line as soon as they wait for a moment.
        ranks.wait_until(rank, "world.summary()[0].oldest.source.endswith(':3')")
    (verdict,) = ranks.diagnose("default_pg")
    for rank in range(3):
        ranks.ask(rank, "world.abort(None, 'the test is over')")
    ranks.ask(2, "gate.set()")
    assert set(ranks.finish()) == {0, 1}
    assert verdict.fault is Fault.RANK_BUSY_ELSEWHERE
    assert verdict.culprits == (2,)
    assert verdict.waiting == (0, 1)
    assert ":3)" in str(verdict)


def test_a_failed_op_is_failed_or_aborted(ranks: Ranks) -> None:
    hang(ranks, {0: "dist.all_reduce(x)"})
    (record,) = ranks.ask(0, "local_dump()")["records"]
    assert record["state"] == "aborted"
    assert "the test is over" in record["error"]
    assert ranks.groups(0)["default_pg"].in_flight == 0
    assert ranks.groups(0)["default_pg"].completed is None
