"""Benchmarks over real ranks: rows as they come, results, groups, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.backends import unavailable_reason
from rankscope.engines import BenchRow, Cluster, ClusterError, ExecutionError
from rankscope.engines.agent import benchmark as on_rank

WAIT = 60


@pytest.mark.processes
def test_rows_come_as_they_are_measured(cluster: Cluster) -> None:
    seen: list[BenchRow] = []
    bench = cluster.bench("all_reduce", "1K:64K:8", iterations=3, on_row=seen.append)
    result = bench.result(WAIT)
    assert seen == list(result)
    assert bench.total == len(result) == 3
    assert list(result["size"]) == [1024, 8192, 65536]
    for row in result:
        assert (row.backend, row.op, row.ranks, row.wrong) == (
            "tcp",
            "all_reduce",
            4,
            0,
        )
        assert row.time_min <= row.time <= row.time_max
        assert row.algbw == pytest.approx(row.size / row.time / 1e3)
        assert row.busbw == pytest.approx(row.algbw * 1.5)


@pytest.mark.processes
def test_backends_are_compared_in_groups_of_their_own(cluster: Cluster) -> None:
    cluster.execute("pair = dist.new_group([1, 3], group_desc='pair')").result(WAIT)
    result = cluster.bench(
        "broadcast", [4096], backends=["tcp"], group="pair", iterations=2
    ).result(WAIT)
    assert [(row.backend, row.ranks) for row in result] == [("tcp", 2)]
    groups = cluster.status(fresh=True).groups
    assert groups == {"default": [0, 1, 2, 3], "pair": [1, 3]}
    cluster.execute("dist.destroy_process_group(pair)", ranks=[1, 3]).result(WAIT)


@pytest.mark.processes
def test_what_cannot_be_measured_is_refused_before_it_starts(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="expected one of all_reduce"):
        cluster.bench("sum")
    with pytest.raises(ValueError, match="expected FIRST:LAST"):
        cluster.bench("all_reduce", "big")
    with pytest.raises(ValueError, match="unknown backend 'glo'"):
        cluster.bench("all_reduce", backends=["glo"])
    with pytest.raises(ValueError, match="unknown backend 'glo'"):
        cluster.bench("all_reduce", backends=["glo"], device="cpu")
    with pytest.raises(ValueError, match="expected a name alone, such as 'tcp'"):
        cluster.bench("all_reduce", backends=["cpu:tcp"])
    with pytest.raises(ClusterError, match="no group called 'nobody'"):
        cluster.bench("all_reduce", group="nobody")


@pytest.mark.parametrize(
    ("names", "device", "measured"),
    [
        (["tcp", "nccl"], None, [("cpu:tcp", "cpu"), ("cuda:nccl", "cuda")]),
        (["tcp"], "cuda", [("cuda:tcp", "cuda")]),
        ([], None, [("own", "cuda")]),
        ([], "cpu", [("own", "cpu")]),
    ],
)
def test_each_backend_gets_the_arrays_that_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    device: str | None,
    measured: list[tuple[str, str]],
) -> None:
    seen: list[tuple[str, str]] = []
    config = SimpleNamespace(device_backend_map={"cuda": "nccl"})
    own = SimpleNamespace(name="own", ranks=[0, 1], timeout=1.0, config=config)

    def new_group(ranks: object, timeout: object, config: str, **rest: object) -> Any:
        return SimpleNamespace(name=config)

    def measure(group: Any, device: str, **wanted: object) -> list[Any]:
        seen.append((group.name, device))
        return []

    monkeypatch.setattr(on_rank, "resolve_group", lambda group, op: own)
    monkeypatch.setattr(on_rank, "new_group", new_group)
    monkeypatch.setattr(on_rank, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(on_rank, "why_refused", lambda device, name: None)
    monkeypatch.setattr(on_rank, "benchmark", measure)
    on_rank.measure_on_rank({"backends": names, "device": device})
    assert seen == measured


@pytest.mark.processes
@pytest.mark.skipif(unavailable_reason("nccl") is None, reason="NCCL can be used")
def test_nccl_is_measured_on_the_gpu_or_says_what_it_needs(cluster: Cluster) -> None:
    reason = unavailable_reason("nccl")
    bench = cluster.bench("all_reduce", [1024], backends=["tcp", "nccl"], iterations=1)
    with pytest.raises(ExecutionError) as caught:
        bench.result(WAIT)
    assert {one.evalue for one in caught.value.errors.values()} == {reason}
    # Each with the arrays it is for.
    assert [row.backend for row in bench.rows] == ["tcp"]
    assert list(cluster.status(fresh=True).groups) == ["default"]


@pytest.mark.processes
def test_a_backend_that_is_not_there_fails_on_every_rank(cluster: Cluster) -> None:
    bench = cluster.bench("all_reduce", [1024], backends=["tcp", "mpi"], iterations=2)
    with pytest.raises(
        ExecutionError, match="the mpi backend cannot be used"
    ) as caught:
        bench.result(WAIT)
    assert sorted(caught.value.errors) == [0, 1, 2, 3]
    assert [row.backend for row in bench.rows] == ["tcp"]
    assert list(cluster.status(fresh=True).groups) == ["default"]
    # The ranks' own group was not touched.
    assert len(cluster.bench("reduce", [64], iterations=1).result(WAIT)) == 1
