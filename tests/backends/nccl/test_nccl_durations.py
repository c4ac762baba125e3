"""Durations of ops on a device, wherever they are shown: those of the CUDA events."""

from __future__ import annotations

import time
from threading import Barrier

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.chrome_trace import chrome_trace
from rankscope.backends.observe.lateness import GroupLateness, Lateness
from rankscope.backends.observe.torch_format import flight_recorder
from rankscope.backends.work.flight_recorder import recorder
from rankscope.engines.status import Summary, decode, encode
from rankscope.widgets.board.model import BoardModel
from rankscope.widgets.board.text import board_text
from rankscope.widgets.lateness_text import lateness_text
from tests.backends.gpu_ranks import Rank, Ranks
from tests.backends.gpu_simulation import Event, Simulation
from tests.widgets import statuses


@pytest.fixture
def shown(ranks: Ranks, simulation: Simulation) -> Ranks:
    """Two ranks that have done an all_reduce, of 2.5 ms as its events say.

    The host saw it start on rank 0 long before it ended.
    """
    recorder.clear()
    simulation.cuda.elapsed_ms = lambda start, end: 2.5  # type: ignore[method-assign]
    ranks.start(2)
    ranks(lambda r: r.all_reduce().synchronize())
    first = ranks.ranks[0]

    def body(r: Rank) -> None:
        if r.rank == 1:
            # The kernel of rank 0 waits for this one.
            until(lambda: any(w.started_ns for w in first.pg.status.in_flight.values()))
        work = dist.all_reduce(r.array(np.ones(1_000_000)), group=r.pg, async_op=True)
        work.synchronize()
        assert work.get_duration() == 2.5
        until(lambda: not r.pg.status.in_flight)

    ranks(body)
    return ranks


def test_the_status_and_the_board_show_the_duration_of_the_events(
    shown: Ranks,
) -> None:
    cluster = []
    for r in shown.ranks:
        # As it comes from the engine of the rank.
        groups = decode(encode(Summary(groups=(r.pg.summary(),)))).groups
        done = groups[0].completed
        assert done is not None
        assert (done.seq, done.duration) == (2, 0.0025)
        cluster.append(statuses.rank(r.rank, *groups))
    status = statuses.cluster(*cluster)
    model = BoardModel.of(status)
    for r in shown.ranks:
        row = model.groups[0].row(r.rank)
        # 8 MB in 2.5 ms: of two ranks, busbw is algbw.
        speeds = row["algbw"], row["busbw"]
        assert (row["last"], *speeds) == ("2.50 ms", "3.20 GB/s", "3.20 GB/s")
    assert board_text(model).count("2.50 ms") == 2


def test_the_dumps_have_the_duration_of_the_events(shown: Ranks) -> None:
    everything = recorder.records()
    for r in shown.ranks:
        mine = [one.as_dict() for one in everything if one.status.rank == r.rank]
        assert [one["duration_ns"] for one in mine] == [2_500_000] * 2
        groups = {mine[0]["group_id"]: {"name": "g", "ranks": [0, 1]}}
        dump = flight_recorder(r.rank, groups, mine)
        for entry in dump["entries"]:
            assert entry["duration_ms"] == 2.5
            ended = entry["time_discovered_completed_ns"]
            assert ended - entry["time_discovered_started_ns"] == 2_500_000
        bars = chrome_trace({r.rank: mine}, {})["traceEvents"]
        assert [one["dur"] for one in bars if one["ph"] == "X"] == [2500.0] * 2


def _lateness(ranks: Ranks, ops: int, *, timing: bool, waits: str) -> GroupLateness:
    """Return what is known where rank 1 enqueues each op long after rank 0."""
    recorder.clear()
    ranks.start(2)
    both, first = Barrier(2), ranks.ranks[0].pg.status

    def body(r: Rank) -> None:
        r.pg.enable_timing(timing)
        for n in range(ops):
            both.wait(30)
            if n and r.rank == 1:
                # The first op has the ranks connected.
                until(lambda: any(one.started_ns for one in first.in_flight.values()))
                time.sleep(0.002)
            getattr(r.all_reduce(), waits)()
            until(lambda: not r.pg.status.in_flight)

    ranks(body)
    lateness = Lateness()
    records = recorder.records()
    key = {"name": "g", "ranks": [0, 1]}
    dumps = {}
    for rank in (0, 1):
        mine = [one.as_dict() for one in records if one.status.rank == rank]
        assert len(mine) == ops
        dumps[rank] = {"groups": {mine[0]["group_id"]: key}, "records": mine}
    lateness.take(dumps)
    (group,) = lateness.groups()
    return group


@pytest.mark.parametrize("waits", ["synchronize", "wait"])
def test_nobody_is_late_by_when_an_op_is_enqueued(ranks: Ranks, waits: str) -> None:
    group = _lateness(ranks, 25, timing=False, waits=waits)
    assert (group.ranks, group.findings, group.speeds) == ({}, (), ())
    assert "enqueued, not when a GPU is there" in lateness_text([group], [])


@pytest.mark.parametrize("waits", ["synchronize", "wait"])
def test_events_tell_when_a_gpu_was_there(
    ranks: Ranks, simulation: Simulation, waits: str
) -> None:
    elapsed_ms = simulation.cuda.elapsed_ms
    asked: list[tuple[float, float]] = []

    def elapsed(start: Event, end: Event) -> float:
        asked.append((start.at, end.at))
        return elapsed_ms(start, end)

    simulation.cuda.elapsed_ms = elapsed  # type: ignore[method-assign]
    group = _lateness(ranks, 5, timing=True, waits=waits)
    assert group.by_events
    assert "4 collectives, by the GPUs' events:" in lateness_text([group], [])
    # Its kernel waits for that of rank 1, each time.
    assert group.ranks[1].by > 0.001
    starts, ends = zip(*asked, strict=True)
    # From the start of each op to its end, and from there to the start of the next one:
    # all but the first and the last of each rank have one before and one after them.
    between = [one for one in asked if one[0] in ends and one[1] in starts]
    assert (len(asked), len(between)) == (2 * (5 + 4), 2 * (5 + 4 - 2))
    known = [one.device_ns for one in recorder.records()]
    assert sorted(len(one or ()) for one in known) == [0] * 2 + [2] * 8
