"""Since when a rank waits, whatever happens to the wall clock."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from rankscope.backends.groups.summary import GroupStatus, OpStatus
from rankscope.backends.groups.world import world
from rankscope.backends.hang_report.waiting import Waiting, rendezvous

GROUP = GroupStatus("default", "0-1", "tcp", 0, "ready", None, None)
OP = OpStatus("all_reduce", 3, "started", elapsed=1.0)


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
def test_a_clock_that_is_set_makes_no_op_older(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    in_flight = [OP]
    monkeypatch.setattr(
        world, "summary", lambda: [replace(GROUP, oldest=one) for one in in_flight]
    )
    waiting, now = Waiting(), time.time()
    assert waiting.since() == pytest.approx(now - 1, abs=0.5)
    in_flight = [replace(OP, elapsed=1.0 + jump)]
    monkeypatch.setattr(time, "time", lambda: now + jump)
    assert waiting.since() == pytest.approx(now + jump - 1, abs=0.5)
    assert waiting.oldest == "all_reduce #3"
    # The next op began after it.
    in_flight = [replace(OP, seq=4, elapsed=0.25)]
    assert waiting.since() == pytest.approx(now + jump - 0.25, abs=0.2)
    in_flight = []
    assert waiting.since() is None
    assert waiting.oldest == ""


def test_the_error_of_a_meeting_has_its_call_and_line() -> None:
    where = {"__name__": "torch.distributed.distributed_c10d"}
    code = "def init_process_group():\n    raise RuntimeError('timed out waiting')"
    file = "/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
    exec(compile(code, file, "exec"), where)
    make: Any = where["init_process_group"]
    with pytest.raises(RuntimeError) as raised:
        make()
    found = rendezvous("node1:29500", raised.value)
    assert found is not None
    assert (found["call"], found["address"]) == ("init_process_group", "node1:29500")
    assert found["line"][0] == __file__
    assert rendezvous("", ValueError()) is None
    assert rendezvous() is None
