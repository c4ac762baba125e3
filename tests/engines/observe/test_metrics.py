"""What a scrape of a cluster finds, read with the library's own parser."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import Fault
from rankscope.engines import ClusterError, ClusterStatus, FlightRecords
from rankscope.engines.observe import metrics
from rankscope.engines.observe.metrics import ClusterCollector, Events, MetricsServer
from rankscope.engines.observe.profiling import Sampling
from rankscope.engines.status import Summary
from tests.backends.observe.late_runs import Run
from tests.widgets import simulated, statuses

DOCS = Path(__file__).parents[3] / "docs"
#: The name of a metric in a text.
_NAME = re.compile(r"\brankscope_[a-z_]+")

Samples = Mapping[tuple[str, tuple[str, ...]], float]


class Ranks:
    """A cluster with a status, and with the records of a run."""

    aborting = False

    def __init__(self, status: ClusterStatus, run: Run | None = None) -> None:
        self.now, self.run = status, run
        self.calls: list[str] = []
        self.gone = False
        self._callbacks: list[Callable[[int, Summary], None]] = []

    def status(self, *, fresh: bool = False, timeout: float = 0.8) -> ClusterStatus:
        return self.now

    def glance(self) -> ClusterStatus:
        return self.now

    def flight_records(self, ranks: Iterable[int], **limits: Any) -> FlightRecords:
        if self.gone:
            raise ClusterError("shut down")
        dumps = {} if self.run is None else self.run.dumps()
        return FlightRecords(dumps, dict.fromkeys(ranks, 0))

    def start_sampling(self, ranks: Iterable[int], *, seconds: float) -> Sampling:
        raise AssertionError("where ranks are is no metric")

    def subscribe(self, callback: Callable[[int, Summary], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def follow(self, interval: float = 0.0) -> None:
        self.calls.append("follow")

    def report(self) -> None:
        for callback in self._callbacks:
            for one in self.now.ranks:
                callback(one.rank, one)


def scrape(ranks: Ranks, events: Events | None = None) -> Samples:
    registry = CollectorRegistry()
    registry.register(ClusterCollector(ranks, events or Events()))  # type: ignore[arg-type]
    return read(generate_latest(registry).decode())


def read(text: str) -> Samples:
    """Name and labels of each sample → its value; the parser refuses what is wrong."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.values())
            assert key not in found, "Prometheus refuses a series that is there twice"
            found[key] = sample.value
    return found


def test_a_rank_and_its_progress() -> None:
    done = simulated.op(14, duration=2e-3)
    now = simulated.op(15, state="started", elapsed=6.0)
    one = statuses.group(
        ranks=range(2),
        completed=done,
        issued=15,
        op_seconds=0.3,
        blocked_seconds=0.25,
        moved={"all_reduce": (14, 14 << 22), "no op": (3, 3)},
    )
    two = replace(one, oldest=now, in_flight=1, issued=16)
    found = scrape(
        Ranks(
            statuses.cluster(
                statuses.rank(0, one, cpu=0.5, memory=96 << 20),
                statuses.rank(1, two, state="busy", heartbeat_age=0.4),
            )
        )
    )
    expected = {
        ("rankscope_ranks", ("idle",)): 1,
        ("rankscope_ranks", ("busy",)): 1,
        ("rankscope_ranks", ("dead",)): 0,
        ("rankscope_cpu_cores", ("0",)): 0.5,
        ("rankscope_memory_bytes", ("0",)): 96 << 20,
        ("rankscope_silence_seconds", ("1",)): 0.4,
        ("rankscope_collectives_total", ("default", "1")): 16,
        ("rankscope_op_seconds_total", ("default", "1")): 0.3,
        ("rankscope_blocked_seconds_total", ("default", "0")): 0.25,
        ("rankscope_ops_total", ("default", "all_reduce", "0")): 14,
        ("rankscope_op_bytes_total", ("default", "all_reduce", "0")): 14 << 22,
        ("rankscope_lag", ("default", "0")): 1,
        ("rankscope_lag", ("default", "1")): 0,
        ("rankscope_in_flight", ("default", "1")): 1,
        ("rankscope_in_flight_seconds", ("default", "0")): 0,
        ("rankscope_in_flight_seconds", ("default", "1")): 6,
        ("rankscope_last_op_seconds", ("default", "0")): 2e-3,
        # 4 MiB in 2 ms; of two ranks, the bus has as much.
        ("rankscope_bus_bandwidth_bytes_per_second", ("default", "0")): 4
        * 2**20
        / 2e-3,
        ("rankscope_aborted", ("default", "0")): 0,
        ("rankscope_groups_left_out", ()): 0,
    }
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)
    # Labels are bounded: a rank may report anything.
    assert not any("no op" in labels for _, labels in found)
    # What is not known has no series: 0 would be a value.
    assert ("rankscope_memory_bytes", ("1",)) not in found
    assert not any(name == "rankscope_late_ratio" for name, _ in found)


def test_a_rank_that_tells_of_an_earlier_generation_is_not_compared() -> None:
    """After a rebuild the ranks report one after the other, a dead one never."""
    groups = [
        replace(statuses.group(ranks=range(3)), generation=generation, issued=issued)
        for generation, issued in ((1, 4), (1, 5), (0, 900))
    ]
    ranks = [statuses.rank(n, one) for n, one in enumerate(groups)]
    found = scrape(Ranks(statuses.cluster(*ranks)))
    lags = {key[1][1]: lag for key, lag in found.items() if key[0] == "rankscope_lag"}
    assert lags == {"0": 1, "1": 0}


def test_a_rank_that_has_gone_on_is_not_behind_by_the_age_of_its_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = [statuses.group(ranks=range(2), issued=issued) for issued in (40, 50)]
    ranks = [statuses.rank(n, one) for n, one in enumerate(groups)]
    cluster, events = Ranks(statuses.cluster(*ranks)), Events()
    for n, one in enumerate(ranks):
        events.note_status(n, one)
    assert scrape(cluster, events)["rankscope_lag", ("default", "0")] == 0
    monkeypatch.setattr(metrics, "STANDSTILL", 0.0)
    assert scrape(cluster, events)["rankscope_lag", ("default", "0")] == 10


def test_who_is_late_and_who_waits() -> None:
    run = Run(heavy=0.2).steps(41, lambda n, rank: 1 + 20 * (rank == 2))
    group = statuses.group(ranks=range(4))
    ranks = [statuses.rank(n, group, heartbeat_age=0.1) for n in range(4)]
    cluster = Ranks(statuses.cluster(*ranks), run)
    found = scrape(cluster)
    late = [found["rankscope_late_ratio", ("default", str(n))] for n in range(4)]
    waits = [found["rankscope_waiting_ratio", ("default", str(n))] for n in range(4)]
    assert late[2] > 0.9
    assert max(late[:2]) < 0.1
    assert min(waits[:2]) > 0.8 > 0.2 > waits[2]
    cluster.gone = True
    assert scrape(cluster)["rankscope_ranks", ("idle",)] == 4


def test_groups_of_one_name_are_told_apart_and_others_escaped() -> None:
    made = [
        statuses.rank(n, statuses.group("tp", (n // 2 * 2, n // 2 * 2 + 1), issued=n))
        for n in range(4)
    ]
    odd = statuses.group('a"\\\n', (4,), issued=7)
    long = [statuses.group("x" * 400 + one, (4,), issued=9) for one in "ab"]
    found = scrape(Ranks(statuses.cluster(*made, statuses.rank(4, odd, *long))))
    ops = {key[1][0]: one for key, one in found.items() if "collectives" in key[0]}
    assert list(ops)[:3] == ["tp (0-1)", "tp (2-3)", 'a"\\\n']
    assert len(ops) == 5
    assert max(map(len, ops)) <= 2 * metrics.LONGEST


def test_series_are_bounded_and_what_is_left_out_is_said() -> None:
    groups = [statuses.group(f"g{n}", range(1024), issued=n) for n in range(6)]
    found = scrape(
        Ranks(statuses.cluster(*(statuses.rank(n, *groups) for n in range(1024))))
    )
    names = {key[1][0] for key in found if key[0] == "rankscope_collectives_total"}
    assert names == {"g0", "g1", "g2", "g3"}
    assert found["rankscope_groups_left_out", ()] == 2


def test_what_has_not_happened_is_0() -> None:
    """Prometheus sees no increase in a series that begins with 1."""
    status = statuses.cluster(statuses.rank(0, statuses.group(ranks=range(2))))
    found = scrape(Ranks(status))
    for fault in Fault:
        assert found["rankscope_stalls_total", (fault.value,)] == 0
    for name in ("aborts", "rebuilds"):
        assert found[f"rankscope_{name}_total", ("default",)] == 0


def test_stalls_aborts_and_rebuilds_count_once() -> None:
    events = Events()
    status, verdicts = simulated.hang(4, 2)
    for _ in range(2):
        events.note_verdicts(verdicts)
    events.note_verdicts([])
    events.note_verdicts(verdicts)
    group = statuses.group()
    # Nobody has looked while it was aborted for the second time; the third generation
    # was replaced without an abort.
    for generation, aborts in ((0, 0), (0, 1), (1, 1), (3, 2)):
        for rank in range(4):
            one = replace(group, aborts=aborts, generation=generation)
            events.note_status(rank, statuses.rank(rank, one))
    # A fresh process of a rank begins with 0.
    for aborts in (0, 1):
        one = replace(group, aborts=aborts, generation=4)
        events.note_status(2, statuses.rank(2, one))
    found = scrape(Ranks(status), events)
    assert found["rankscope_stalls_total", ("missing ranks",)] == 2
    assert found["rankscope_aborts_total", ("default",)] == 3
    assert found["rankscope_rebuilds_total", ("default",)] == 4
    assert events.aborts == {GroupKey("default", (0, 1, 2, 3)): 3}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MetricsServer, Ranks]]:
    class Quiet:
        def __init__(self, *_: object, tells: bool) -> None:
            assert not tells

        def close(self) -> None:
            pass

    monkeypatch.setattr(metrics, "StallWatch", Quiet)
    ranks = Ranks(simulated.Simulation(4).step())
    found = MetricsServer(ranks, 0)  # type: ignore[arg-type]
    try:
        yield found, ranks
    finally:
        found.close()


def test_they_are_served_on_this_host_alone(
    server: tuple[MetricsServer, Ranks],
) -> None:
    served, ranks = server
    assert served.address == f"http://127.0.0.1:{served.port}/metrics"
    assert ranks.calls == ["follow"]
    one = replace(ranks.now.ranks[0].groups[0], state="aborted", aborts=1)
    ranks.now = statuses.cluster(statuses.rank(0, one))
    ranks.report()
    request = urllib.request.Request(
        served.address, headers={"Accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert "openmetrics" in answer.headers["Content-Type"]
        found = read(answer.read().decode())
    assert found["rankscope_aborts_total", ("default",)] == 1
    assert found["rankscope_aborted", ("default", "0")] == 1
    with pytest.raises(
        ClusterError, match=f"port {served.port} .* in use; .*--metrics"
    ):
        MetricsServer(ranks, served.port)  # type: ignore[arg-type]


def everything() -> Ranks:
    """Return ranks of which each metric has a value: rank 3 is behind."""
    group = statuses.group(ranks=range(4), completed=simulated.op(1, duration=1e-3))
    group = replace(
        group, issued=2, state="aborted", op_seconds=1.0, blocked_seconds=1.0
    )
    group = replace(group, moved={"barrier": (1, 0)})
    groups = [*[group] * 3, replace(group, issued=1)]
    made = [
        statuses.rank(n, one, heartbeat_age=0.1, memory=1, cpu=1.0, gpu_memory=1)
        for n, one in enumerate(groups)
    ]
    run = Run(heavy=0.2).steps(41, lambda n, rank: 1)
    return Ranks(statuses.cluster(*made), run)


def queries() -> list[str]:
    """Return what the panels of the dashboard ask Prometheus."""
    board = json.loads((DOCS / "_static" / "grafana.json").read_text(encoding="utf-8"))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    return [one["expr"] for panel in board["panels"] for one in panel["targets"]]


def test_the_docs_and_the_dashboard_name_what_there_is() -> None:
    """All of it, but for the bucket of what is left out."""
    ranks, events = everything(), Events()
    events.note_verdicts(simulated.hang(4, 2)[1])
    for generation in (0, 1):
        one = replace(ranks.now.ranks[0].groups[0], generation=generation)
        events.note_status(0, statuses.rank(0, one))
    there = {name for name, _ in scrape(ranks, events)}
    page = set(_NAME.findall((DOCS / "in_a_notebook.md").read_text(encoding="utf-8")))
    assert page == there
    assert {name for one in queries() for name in _NAME.findall(one)} <= there


_CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
- job_name: ranks
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@pytest.mark.processes
@pytest.mark.skipif(not which("prometheus"), reason="there is no Prometheus here")
def test_prometheus_answers_each_query_of_the_dashboard(
    server: tuple[MetricsServer, Ranks], tmp_path: Path
) -> None:
    served, ranks = server
    ranks.now, ranks.run = everything().now, everything().run
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "prometheus.yml"
    config.write_text(_CONFIG.format(port=served.port), encoding="utf-8")
    with (tmp_path / "log").open("wb") as log:
        address = f"127.0.0.1:{port}"
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address={address}",
            ],
            stderr=log,
            stdout=log,
        )
    try:
        wanted = [one.replace("$group", ".*") for one in queries()]

        def unanswered() -> list[str]:
            found = []
            for one in wanted:
                url = f"http://{address}/api/v1/query?query={quote(one)}"
                try:
                    with urllib.request.urlopen(url, timeout=30) as answer:
                        if not json.load(answer)["data"]["result"]:
                            found.append(one)
                except HTTPError as error:
                    # A query that is none; while it starts, it says 503.
                    if error.code != 503:
                        raise AssertionError(one, error.read()) from error
                    return wanted
                except URLError:
                    return wanted
            return found

        deadline = time.monotonic() + 60
        while left := unanswered():
            assert time.monotonic() < deadline, left
            assert process.poll() is None, (tmp_path / "log").read_text("utf-8")
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
