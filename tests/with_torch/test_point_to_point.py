"""Sends and receives over gloo, which torch's own recorder does not have."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.backends.observe.verdicts import Fault
from tests.with_torch.ranks import Ranks


def ops(ranks: Ranks, rank: int) -> list[dict[str, Any]]:
    return [one for one in ranks.ask(rank, "local_dump()")["records"] if one["is_p2p"]]


def test_a_receive_is_in_flight_until_the_send(ranks: Ranks) -> None:
    ranks.start({1: "dist.recv(x, src=0)"})
    ranks.wait_for_ops("default_pg", [1], "recv")
    oldest = ranks.groups(1)["default_pg"].oldest
    assert (oldest.op, oldest.seq, oldest.peer) == ("recv", 1, 0)
    assert oldest.sizes == ((4, 3),)
    assert oldest.dtypes == ("float32",)
    assert oldest.source.startswith("cell")
    (verdict,) = ranks.diagnose("default_pg")
    assert verdict.fault is Fault.MISSING_RANKS
    assert verdict.culprits == (0,)
    assert "rank 0 has not issued the send" in str(verdict)
    ranks.run({0: "dist.send(x, dst=1)"})
    assert ranks.finish([1]) == {}
    for rank, op in enumerate(("send", "recv")):
        (record,) = ops(ranks, rank)
        assert (record["op"], record["state"], record["peer"]) == (
            op,
            "completed",
            1 - rank,
        )
        assert record["p2p_seq_id"] == 1
    assert ranks.groups(1)["default_pg"].in_flight == 0


def test_a_receive_from_any_rank_learns_the_sender(ranks: Ranks) -> None:
    ranks.start({0: "dist.recv(x)"})
    ranks.wait_for_ops("default_pg", [0], "recv")
    assert ranks.groups(0)["default_pg"].oldest.peer is None
    (verdict,) = ranks.diagnose("default_pg")
    assert "rank 0 waits in recv #1 from any rank" in str(verdict)
    ranks.run({1: "dist.send(x, dst=0)"})
    assert ranks.finish([0]) == {}
    (record,) = ops(ranks, 0)
    assert (record["peer"], record["state"]) == (1, "completed")


def test_a_batch_is_shown_op_by_op(ranks: Ranks) -> None:
    ranks.run(
        "y = torch.empty(4, 3)\n"
        "work = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other),\n"
        "    dist.P2POp(dist.irecv, y, other)])\n"
        "[one.wait() for one in work]\n"
    )
    for rank in range(2):
        found = ops(ranks, rank)
        assert [one["op"] for one in found] == ["send", "recv"]
        assert [one["p2p_seq_id"] for one in found] == [1, 2]
        assert {one["state"] for one in found} == {"completed"}
        assert {one["peer"] for one in found} == {1 - rank}


def test_an_op_of_which_the_work_was_dropped_is_not_in_flight(ranks: Ranks) -> None:
    ranks.run({0: "work = dist.isend(x, 1)", 1: "dist.recv(x, 0)"})
    assert ops(ranks, 0)[0]["state"] == "started"
    ranks.run({0: "del work"})
    assert ops(ranks, 0)[0]["state"] == "completed"


BEGIN = "from rankscope.backends.work.unwaited import unwaited\nunwaited.begin()\n"
# A send is lost if its Work is dropped before the other rank has received.
END = "\ndist.barrier()\ndel work"


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("work = dist.all_reduce(x, async_op=True)", ["all_reduce"]),
        ("work = dist.isend(x, other); dist.recv(x, other)", ["send"]),
        (
            "work = [dist.broadcast(x, 0, async_op=True), dist.barrier(async_op=True)]",
            ["broadcast", "barrier"],
        ),
        ("work = dist.all_reduce(x, async_op=True); work.wait()", []),
        ("work = dist.all_reduce(x, async_op=True).get_future(); work.wait()", []),
        ("work = dist.all_reduce(x)", []),
        ("work = dist.irecv(x, other); dist.send(x, other); work.wait()", []),
        (
            "work = dist.all_reduce(x, async_op=True)\n"
            "while not work.is_completed(): time.sleep(0.001)",
            [],
        ),
    ],
)
def test_an_op_that_nobody_waited_for(
    ranks: Ranks, code: str, named: list[str]
) -> None:
    ranks.run(BEGIN + code + END)
    for rank in range(2):
        found = ranks.ask(rank, "[one.op_type.value for one in unwaited.end()]")
        assert found == named
