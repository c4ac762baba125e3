"""Since when a rank waits, whatever happens to the wall clock."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.hang_report.waiting import Waiting, rendezvous


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
def test_a_clock_that_is_set_makes_no_op_older(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    first = dist.all_reduce(np.ones(3), async_op=True)
    assert first is not None
    wall, wall_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(jump * 1e9))
    waiting = Waiting()
    assert waiting.since() == pytest.approx(time.time(), abs=60)
    assert waiting.oldest.startswith("all_reduce #1 (test_waiting.py:")
    second = dist.all_reduce(np.ones(3), async_op=True)
    assert second is not None
    first.mark_completed()
    assert waiting.since() == pytest.approx(time.time(), abs=60)
    assert waiting.oldest.startswith("all_reduce #2")
    second.mark_completed()
    assert waiting.since() is None
    assert waiting.oldest == ""


def test_the_error_of_a_meeting_has_its_call_and_line() -> None:
    where = {"__name__": "torch.distributed.distributed_c10d"}
    code = (
        "def init_process_group(init_method=None, world_size=-1):\n"
        "    raise RuntimeError('timed out waiting')"
    )
    file = "/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
    exec(compile(code, file, "exec"), where)
    make: Any = where["init_process_group"]
    for given, at in (
        ((), {"address": "node1:29500"}),
        (("env://", -1), {"address": "node1:29500"}),
        (("tcp://node2:7", 4), {"address": "node2:7", "world_size": 4}),
    ):
        with pytest.raises(RuntimeError) as raised:
            make(*given)
        found = rendezvous("node1:29500", raised.value)
        assert found is not None
        assert found.pop("line")[0] == __file__
        assert found == {"call": "init_process_group", **at}
    assert rendezvous("", ValueError()) is None
    assert rendezvous() is None
