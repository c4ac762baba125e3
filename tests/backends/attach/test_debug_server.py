"""The page of torch's debug server, which has the Flight Recorder of each rank."""

from __future__ import annotations

import json
from typing import Any

from rankscope.backends.attach.debug_server import read_page
from rankscope.backends.observe.evidence import combine
from rankscope.backends.observe.root_cause import find_root_causes

RANK = """
        <h2>Rank {rank}: http://node1:{port}/handler/fr_trace_json?</h2>

            <pre>{text}</pre>
"""
FAILED = """
        <h2>Rank 2: http://node1:9/handler/fr_trace_json?</h2>

            <p>Failed to fetch: status=408</p>
            <pre>Timeout: {}</pre>
"""


def dump(ops: int) -> dict[str, Any]:
    entry = {
        "profiling_name": "gloo:all_reduce",
        "process_group": ["0", "default_pg"],
        "pg_id": 0,
        "is_p2p": False,
        "p2p_seq_id": 0,
        "state": "scheduled",
        "time_created_ns": 1,
    }
    entries = [
        {**entry, "record_id": n, "op_id": n, "collective_seq_id": n + 1}
        | {"retired": n == 0}
        for n in range(ops)
    ]
    return {
        "version": "2.10",
        "entries": entries,
        "pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1]"}},
        "pg_status": {
            "0": {
                "last_completed_collective": "1",
                "last_enqueued_collective": str(ops),
                "last_started_collective": "-1",
            }
        },
    }


def page(*dumps: dict[str, Any]) -> bytes:
    texts = (
        RANK.format(rank=rank, port=4000 + rank, text=json.dumps(one, indent=2))
        for rank, one in enumerate(dumps)
    )
    return f"<h1>FlightRecorder</h1>{''.join(texts)}{FAILED}</section>".encode()


def test_the_ranks_that_have_answered() -> None:
    found = read_page(page(dump(2), dump(1)))
    ops = {one.rank: next(iter(one.groups.values())).ops for one in found.ranks}
    assert {rank: len(issued) for rank, issued in ops.items()} == {0: 2, 1: 1}


def test_they_give_a_verdict() -> None:
    found = read_page(page(dump(2), dump(1)))
    assert found.problem == ""
    (verdict,) = find_root_causes(combine(found.ranks, 2, found.groups))
    assert verdict.culprits == (1,)
    assert verdict.op == "all_reduce"


def test_progress_differs_once_a_rank_goes_on() -> None:
    before, after = (read_page(page(dump(2), dump(ops))).progress for ops in (1, 2))
    assert before != after


def test_what_is_no_page_tells_nothing() -> None:
    assert read_page(b"<pre>{}</pre>").problem == "no rank has answered it"
    damaged, empty = (
        RANK.format(rank=0, port=1, text=text).encode() for text in ("{", "{}")
    )
    assert "damaged" in read_page(damaged).problem
    assert "no dump" in read_page(empty).problem
