"""The watch where torch's Flight Recorder is off: the wrappers alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope.backends.observe.verdicts import Fault
from tests.with_torch.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, env={"TORCH_FR_BUFFER_SIZE": "0"}) as made:
        made.init()
        made.run("x = torch.ones(4, 3)")
        yield made


def test_the_calls_of_python_are_shown_with_an_advice(ranks: Ranks) -> None:
    ranks.run("for _ in range(3): dist.all_reduce(x)")
    records = ranks.ask(0, "local_dump()")["records"]
    assert [one["collective_seq_id"] for one in records] == [1, 2, 3]
    assert {one["state"] for one in records} == {"completed"}
    assert records[0]["sizes"] == [[4, 3]]
    assert records[0]["reduce_op"] == "sum"
    # Once, on the board and in the table of the notebook as well as in the log.
    (advice,) = ranks.ask(0, "world.advice()")
    assert "TORCH_FR_BUFFER_SIZE=256" in advice


def test_a_hang_has_a_verdict(ranks: Ranks) -> None:
    ranks.run("dist.barrier()")
    ranks.start({1: "dist.all_reduce(x)"})
    ranks.wait_for_ops("default_pg", [1], "all_reduce")
    (verdict,) = ranks.diagnose("default_pg")
    assert verdict.fault is Fault.MISSING_RANKS
    assert verdict.culprits == (0,)
    ranks.run({0: "dist.all_reduce(x)"})
    assert ranks.finish([1]) == {}
    assert ranks.groups(1)["default_pg"].in_flight == 0
