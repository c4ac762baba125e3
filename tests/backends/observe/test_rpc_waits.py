"""Verdicts on RPCs that are not answered, from records made by hand: no torch here."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.diagnosis import diagnose
from rankscope.backends.observe.verdicts import Fault, RankView, Verdict
from rankscope.backends.work.flight_recorder import recorder
from rankscope.backends.work.record_fields import record_fields

SECOND = 1_000_000_000
NOW = 1_000 * SECOND
GROUP = GroupKey("rpc", (0, 1, 2))


def entry(number: int, op: str, state: str, age: float, rpc: Any) -> dict[str, Any]:
    """The record of a call or of a function that began `age` seconds ago, at line 4."""
    began = NOW - round(age * SECOND)
    found = record_fields(
        record_id=number,
        group=GROUP.name,
        group_id=GROUP.id,
        p2p_seq_id=number,
        op=op,
        backend="tensorpipe",
        is_p2p=True,
        state=state,
        timeout=60.0,
        created_ns=began,
        started_ns=began,
        ended_ns=0 if state in ("started", "serving") else NOW,
        frame=("program.py", 4, "step"),
        name_source=recorder.name_source,
    )
    return {**found, "rpc": rpc}


def call(
    to: int | None,
    *,
    op: str = "rpc_sync",
    function: str = "block",
    age: float = 10.0,
    state: str = "started",
    within: int | None = None,
    number: int = 7,
) -> dict[str, Any]:
    """A call of `function` on the worker of rank `to`."""
    worker = "" if to is None else f"worker{to}"
    title = f"{op} to {worker}" if worker else op
    rpc = {
        "call": op,
        "worker": worker,
        "peer": to,
        "function": function if worker else "",
        "within": within,
    }
    return entry(number, title, state, age, rpc)


def served(
    number: int = 3,
    *,
    function: str = "block",
    still_for: float = 10.0,
    returned: bool = False,
    state: str = "serving",
) -> dict[str, Any]:
    """A function that a rank runs for another one."""
    rpc = {
        "call": "run",
        "number": number,
        "function": function,
        "returned": returned,
        "still_for": still_for,
    }
    return entry(number, f"run {function}", state, 10.0, rpc)


def verdicts(
    *records: list[dict[str, Any]], stall: float = 5.0, **views: Any
) -> list[Verdict]:
    """The verdicts on ranks that have these records; `views` by ``rankN``."""
    found = {
        rank: RankView(rank, records=ours, now_ns=NOW, **views.get(f"rank{rank}", {}))
        for rank, ours in enumerate(records)
    }
    return diagnose(GROUP, 0, found, stall)


def test_a_function_that_does_not_return_is_named_with_its_line() -> None:
    (verdict,) = verdicts([call(2)], [], [served()])
    assert verdict.fault is Fault.UNANSWERED_RPC
    assert (verdict.culprits, verdict.waiting) == ((2,), (0,))
    assert (verdict.op, verdict.seq) == ("rpc_sync to worker2", 7)
    assert str(verdict).endswith(
        "rank 0 waits in program.py:4 `rpc_sync to worker2` for `block`; "
        "rank 2 runs `block`, at program.py:4"
    )


def test_nested_calls_lead_to_the_last_worker_and_are_one_verdict() -> None:
    (verdict,) = verdicts(
        [call(1, function="nested")],
        [served(5, function="nested"), call(2, within=5)],
        [served()],
    )
    assert (verdict.culprits, verdict.waiting) == ((2,), (0, 1))
    text = str(verdict)
    assert text.index("for `nested`") < text.index("for `block`")
    assert "rank 2 runs `block`" in text


def test_all_who_wait_for_one_function_are_in_its_verdict() -> None:
    (verdict,) = verdicts([call(2)], [call(2)], [served(3), served(4)])
    assert verdict.waiting == (0, 1)
    assert "rank 1 waits too" in str(verdict)


def test_a_ring_of_calls_ends_where_it_comes_back() -> None:
    """Each rank runs `ring` and waits for the next one: no endless path."""
    ring = [
        [served(9, function="ring"), call((n + 1) % 3, function="ring", within=9)]
        for n in range(3)
    ]
    found = verdicts(*ring)
    assert found
    assert all(str(one).count("for `ring`") == 4 for one in found)


@pytest.mark.parametrize(
    ("calls", "runs"),
    [
        ([call(2, age=4.0)], [served()]),
        ([call(2, state="issued")], [served()]),
        ([call(2, state="completed")], []),
        # It moves: it was at another line a moment ago.
        ([call(2)], [served(still_for=1.0)]),
    ],
    ids=["young", "nobody waits", "over", "moves"],
)
def test_what_is_no_hang(
    calls: list[dict[str, Any]], runs: list[dict[str, Any]]
) -> None:
    assert verdicts(calls, [], runs) == []


def test_a_future_that_is_not_done() -> None:
    (verdict,) = verdicts([call(2)], [], [served(returned=True)])
    assert "on rank 2, `block` has returned a Future that is not done" in str(verdict)


def test_a_worker_that_does_not_run_the_function() -> None:
    (verdict,) = verdicts(
        [call(2)], [], [served(function="other")], rank2={"location": "cell 7 line 3"}
    )
    assert "rank 2 does not run it now, but `other` (program.py:4)" in str(verdict)
    assert str(verdict).endswith("; its cell is at cell 7 line 3")
    (verdict,) = verdicts([call(2)], [], [])
    assert str(verdict).endswith("rank 2 runs no function for others now")


def test_a_dead_worker_is_said_once() -> None:
    (verdict,) = verdicts([call(2)], [], [], rank2={"death": "rank 2 is dead: killed"})
    assert verdict.fault is Fault.RANK_DEAD


@pytest.mark.parametrize("op", ["init_rpc", "shutdown"])
def test_who_did_not_come_to_a_meeting(op: str) -> None:
    there = [call(None, op=op)]
    (verdict,) = verdicts(
        there, there, [], rank2={"last_cell_exit": "left cell 7 at its end"}
    )
    assert (verdict.culprits, verdict.waiting) == ((2,), (0, 1))
    assert str(verdict).endswith(
        f"rank 2 did not call {op}: rank 2 left cell 7 at its end; "
        f"ranks 0–1 wait in program.py:4 `{op}`"
    )
    assert verdicts(there, there, there) == []
