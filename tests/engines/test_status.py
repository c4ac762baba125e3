"""The status model, the slots and their environment: plain data, no engines."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from dataclasses import asdict, replace
from typing import Any

import pytest

from rankscope.engines import ClusterError, ClusterStatus
from rankscope.engines.observe.rank_slots import (
    RankSlot,
    check_ranks,
    environment,
)
from rankscope.engines.status import (
    GroupStatus,
    OpStatus,
    Summary,
    decode,
    encode,
    name_groups,
)
from rankscope.engines.wire.gpu_environment import Gpus

OP = OpStatus("all_reduce", 4, source="cell 7 line 3")
GROUP = GroupStatus(
    name="default",
    members="0-1",
    backend="cpu:tcp",
    generation=2,
    state="ready",
    reason=None,
    timeout=30.0,
    devices={"cpu": "tcp (not built)"},
    transports={"shm,cma": (1,)},
    enqueued=OP,
    started=OP,
    in_flight=1,
    oldest=OpStatus(
        "all_reduce",
        4,
        state="started",
        elapsed=1.5,
        timeout=30.0,
        sizes=((4, 2),),
        dtypes=("float32",),
        source="cell 7 line 3",
    ),
)
SUMMARY = Summary(
    3,
    pid=101,
    gpu="GPU 0",
    memory=96 << 20,
    cpu=1.25,
    gpu_memory=3 << 30,
    busy=True,
    busy_for=2.5,
    cell=7,
    line="cell 7 line 2",
    line_for=1.5,
    groups=(GROUP,),
    advice=("set X",),
)


def text(**fields: Any) -> str:
    """Return a summary as it arrives, with other fields."""
    return json.dumps({**asdict(SUMMARY), **fields})


def slot(rank: int, host: str = "a", **options: Any) -> RankSlot:
    return RankSlot(
        rank=rank,
        engine_id=rank + 10,
        uuid=f"u{rank}",
        pid=100 + rank,
        host=host,
        address="10.0.0.1",
        port=5000,
        **options,
    )


class TestSummaries:
    def test_a_summary_arrives_as_it_was_sent(self) -> None:
        assert decode(encode(SUMMARY)) == SUMMARY
        assert decode(encode(SUMMARY).encode()) == SUMMARY

    def test_a_rank_that_reported_nothing_yet(self) -> None:
        assert decode("{}") == Summary()

    def test_a_limit_that_is_infinite_is_none(self) -> None:
        found = decode(encode(Summary(groups=(replace(GROUP, timeout=math.inf),))))
        assert found.groups[0].timeout is None

    def test_a_thread_that_is_a_path_is_refused(self) -> None:
        """It would be a part of a path in ``/proc``."""
        with pytest.raises(ValueError, match=r"\$\.status_thread"):
            decode(text(status_thread="../1"))

    @pytest.mark.parametrize("advice", ["set X", [3], 3])
    def test_advice_that_is_none_is_refused(self, advice: Any) -> None:
        with pytest.raises(ValueError, match=r"\$\.advice"):
            decode(text(advice=advice))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("name", 3),
            ("members", ["1"]),
            ("members", "0,one"),
            ("members", "3-1"),
            ("members", "0-999999999"),
            ("members", "0-999999," * 2),
            ("generation", True),
            ("timeout", math.nan),
            ("devices", []),
            ("transports", []),
            ("transports", {"tcp": "0-"}),
            ("transports", {"tcp": [None]}),
            ("oldest", {"op": "send", "elapsed": math.inf}),
        ],
    )
    def test_what_is_not_what_it_should_be_is_refused(
        self, field: str, value: Any
    ) -> None:
        encoded = text(groups=[{**asdict(GROUP), field: value}])
        with pytest.raises(
            ValueError, match=r"Expected|malformed|invalid|ranks"
        ) as refused:
            decode(encoded)
        # The reason is shown, and the status of the others is not affected.
        one = slot(1)
        one.record(refused.value)
        status = one.status(0.0)
        assert status.groups == ()
        assert status.reason is not None
        assert "cannot be read" in status.reason

    @pytest.mark.parametrize(
        ("received", "summary", "death", "state"),
        [
            (None, Summary(), None, "unreachable"),
            (99.5, SUMMARY, None, "busy"),
            (99.5, replace(SUMMARY, busy=False), None, "idle"),
            (90.0, SUMMARY, None, "unreachable"),
            (99.5, SUMMARY, "it died", "dead"),
        ],
    )
    def test_the_state_of_a_rank(
        self, received: float | None, summary: Summary, death: str | None, state: str
    ) -> None:
        one = slot(1, summary_at=received, summary=summary, death=death).status(100.0)
        assert one.state == state
        assert one.alive == (death is None)
        assert one.reason == death
        assert one.heartbeat_age == (None if received is None else 100.0 - received)
        # A dead rank runs no cell, whatever its last summary was.
        assert one.cell == (summary.cell if death is None else None)
        assert one.line == summary.line

    def test_a_cluster(self) -> None:
        ranks = (
            slot(0, death="gone").status(0.0),
            slot(1, summary_at=0.0, summary=SUMMARY).status(0.0),
        )
        status = ClusterStatus("id", "p", "local", "", "running", ranks)
        assert status.dead == [0]
        assert status.groups == {"default": [0, 1]}
        assert ranks[1].group("default") is not None
        assert ranks[1].group("tp") is None


class TestSeats:
    def test_many_groups_are_named_by_the_first(self) -> None:
        assert name_groups("tp") == "group 'tp'"
        assert name_groups([*"abca"]) == "groups 'a', 'b', 'c'"
        assert name_groups([*"abcd"]) == "groups 'a', 'b', 'c', 'd'"
        assert name_groups([*"abcde"]) == "groups 'a', 'b', 'c' and 2 more"

    def test_local_ranks_count_within_a_host(self) -> None:
        env = environment([slot(0), slot(1, "b"), slot(2), slot(3, "b")], Gpus())
        assert [env[r]["LOCAL_RANK"] for r in range(4)] == ["0", "0", "1", "1"]
        assert {one["LOCAL_WORLD_SIZE"] for one in env.values()} == {"2"}
        assert {one["MASTER_ADDR"] for one in env.values()} == {"10.0.0.1"}
        assert {one["MASTER_PORT"] for one in env.values()} == {"5000"}

    def test_one_host_uses_loopback(self) -> None:
        assert environment([slot(0), slot(1)], Gpus())[1]["MASTER_ADDR"] == "127.0.0.1"

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            (-9, "killed by SIGKILL"),
            (-250, "killed by signal 250"),
            (3, "exit code 3"),
            (None, "its process ended, or its controller had no heartbeat of it"),
        ],
    )
    def test_how_an_engine_ended(self, code: int | None, said: str) -> None:
        assert slot(1).exit_cause(code) == f"{said} (engine 11, pid 101 on a)"

    def test_a_rank_that_was_silent_has_not_ended_for_certain(self) -> None:
        """Unless an exit code says so, or its process would be one of this host."""
        far = slot(1)
        far.summary_at = time.monotonic() - 34
        assert re.fullmatch(
            r"not heard of for 3[45] s \(last at \d\d:\d\d:\d\d\): its host does not "
            r"answer, or its process has ended \(engine 11, pid 101 on a\)",
            far.exit_cause(None),
        )
        assert far.exit_cause(3) == "exit code 3 (engine 11, pid 101 on a)"
        far.host = socket.gethostname()
        assert far.exit_cause(None).startswith("its process ended (")

    def test_ranks_are_sorted_and_unique(self) -> None:
        assert check_ranks([3, 1, 3], 4) == [1, 3]
        assert check_ranks(2, 4) == [2]
        assert check_ranks(None, 2) == [0, 1]

    @pytest.mark.parametrize("ranks", [[4], -1, [0, 7], [True], [1.0]])
    def test_ranks_that_are_not_there(self, ranks: Any) -> None:
        with pytest.raises(ClusterError, match="has ranks 0–3"):
            check_ranks(ranks, 4)
