"""The status model, the slots and their environment: plain data, no engines."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.engines import ClusterError, ClusterStatus
from rankscope.engines.cluster.gpus import Gpus
from rankscope.engines.cluster.rank_slots import (
    RankSlot,
    check_ranks,
    environment,
)
from rankscope.engines.wire.status_codec import Parsed, pack, parse_summary, unpack

OP = {"op": "all_reduce", "seq": 4, "source": "cell 7 line 3"}

SUMMARY: dict[str, Any] = {
    "gpu": "GPU 0",
    "memory": 96 << 20,
    "gpu_memory": 3 << 30,
    "rank": 1,
    "world_size": 2,
    "busy": True,
    "busy_for": 2.5,
    "cell": 7,
    "line": "cell 7 line 2",
    "line_for": 1.5,
    "groups": [
        {
            "name": "default",
            "ranks": [0, 1],
            "backend": "cpu:gloo",
            "generation": 2,
            "state": "ready",
            "reason": None,
            "timeout": 30.0,
            "devices": {"cpu": "gloo (not built)"},
            "enqueued": OP,
            "started": OP,
            "completed": None,
            "in_flight": 1,
            "oldest": {
                **OP,
                "state": "STARTED",
                "elapsed": 1.5,
                "timeout": 30.0,
                "sizes": [[4, 2]],
                "dtypes": ["float32"],
                "peer": None,
            },
        }
    ],
}


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
    def test_everything_a_rank_says_is_there(self) -> None:
        said = parse_summary({**SUMMARY, "advice": ["set X"]})
        (group,) = said.groups
        assert (said.gpu, said.memory) == ("GPU 0", 96 << 20)
        assert said.gpu_memory == 3 << 30
        assert (said.cell, said.busy_for) == (7, 2.5)
        assert (said.line, said.line_for) == ("cell 7 line 2", 1.5)
        assert said.advice == ("set X",)
        assert (group.name, group.ranks, group.generation) == ("default", (0, 1), 2)
        assert group.oldest is not None
        assert group.oldest.sizes == ((4, 2),)
        assert group.oldest.source == "cell 7 line 3"
        assert group.completed is None

    def test_a_rank_that_said_nothing_yet(self) -> None:
        assert parse_summary({}) == Parsed()

    @pytest.mark.parametrize("advice", ["set X", [3], 3])
    def test_advice_that_is_none_is_refused(self, advice: Any) -> None:
        with pytest.raises(ValueError, match="advice is "):
            parse_summary({"advice": advice})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("name", 3),
            ("ranks", "01"),
            ("ranks", [-1]),
            ("generation", True),
            ("timeout", float("nan")),
            ("devices", []),
            ("transports", []),
            ("transports", {"tcp": "0-"}),
            ("transports", {3: [1]}),
            ("transports", {"tcp": [-1]}),
            ("oldest", {"op": "send", "elapsed": float("inf")}),
        ],
    )
    def test_what_is_not_what_it_should_be_is_refused(
        self, field: str, value: Any
    ) -> None:
        group = {**SUMMARY["groups"][0], field: value}
        with pytest.raises(ValueError, match="is "):
            parse_summary({"groups": [group]})
        # The reason is shown, and the status of the others is not affected.
        status = slot(1, summary_at=0.0, summary={"groups": [group]}).status(0.0)
        assert status.groups == ()
        assert status.reason is not None
        assert "cannot be read" in status.reason

    @pytest.mark.parametrize(
        ("received", "summary", "death", "state"),
        [
            (None, {}, None, "unreachable"),
            (99.5, SUMMARY, None, "busy"),
            (99.5, {**SUMMARY, "busy": False}, None, "idle"),
            (90.0, SUMMARY, None, "unreachable"),
            (99.5, SUMMARY, "it died", "dead"),
        ],
    )
    def test_the_state_of_a_rank(
        self, received: float | None, summary: dict, death: str | None, state: str
    ) -> None:
        one = slot(1, summary_at=received, summary=summary, death=death).status(100.0)
        assert one.state == state
        assert one.alive == (death is None)
        assert one.reason == death
        assert one.heartbeat_age == (None if received is None else 100.0 - received)
        # A dead rank runs no cell, whatever its last summary was.
        assert one.cell == (7 if summary and death is None else None)

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
            (None, "its process ended"),
        ],
    )
    def test_how_an_engine_ended(self, code: int | None, said: str) -> None:
        assert slot(1).exit_cause(code) == f"{said} (engine 11, pid 101 on a)"

    def test_ranks_are_sorted_and_unique(self) -> None:
        assert check_ranks([3, 1, 3], 4) == [1, 3]
        assert check_ranks(2, 4) == [2]
        assert check_ranks(None, 2) == [0, 1]

    @pytest.mark.parametrize("ranks", [[4], -1, [0, 7], [True], [1.0]])
    def test_ranks_that_are_not_there(self, ranks: Any) -> None:
        with pytest.raises(ClusterError, match="has ranks 0–3"):
            check_ranks(ranks, 4)


class TestTravel:
    @pytest.mark.parametrize(
        ("ranks", "packed"),
        [([0], "0"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3, 9], "0,2-3,9"), ([1, 0], "1,0")],
    )
    def test_ranks_travel_as_runs(self, ranks: list[int], packed: str) -> None:
        summary = pack({"pid": 1, "groups": [{"name": "tp", "ranks": ranks}]})
        assert summary["groups"][0]["ranks"] == packed
        assert unpack(summary)["groups"][0]["ranks"] == ranks

    def test_transports_travel_as_runs(self) -> None:
        transports = {"shm,cma": [0, 1, 2], "tcp": [4, 6]}
        group = {**SUMMARY["groups"][0], "transports": transports}
        packed = pack({"groups": [group]})
        assert packed["groups"][0]["transports"] == {"shm,cma": "0-2", "tcp": "4,6"}
        (read,) = parse_summary(unpack(packed)).groups
        assert read.transports == {
            **dict.fromkeys([0, 1, 2], ("shm", "cma")),
            **dict.fromkeys([4, 6], ("tcp",)),
        }

    def test_a_rank_that_tells_no_transports(self) -> None:
        (group,) = parse_summary(unpack(pack(SUMMARY))).groups
        assert group.transports == {}

    @pytest.mark.parametrize(
        "ranks",
        ["", "-", "a-b", "0-", "0-99999999999", "0-9" * 99, "3-1,", [1], 5, None],
    )
    def test_what_is_no_run_is_refused_when_it_is_read(self, ranks: object) -> None:
        group = {**SUMMARY["groups"][0], "ranks": ranks}
        found = unpack({"groups": [group, 7]})["groups"][0]["ranks"]
        assert found == ranks or found == [ranks] or isinstance(found, list)
        assert unpack({"groups": 3}) == {"groups": 3}
        if ranks != [1]:
            with pytest.raises((ValueError, KeyError)):
                parse_summary({"groups": [{**group, "ranks": found}]})
