"""What a job that ends well says of who kept the others waiting: once, or nothing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.hang_report import meeting as meeting_module
from rankscope.backends.hang_report.last_line import LAST, last_line, last_ops
from rankscope.backends.hang_report.meeting import Meeting
from rankscope.backends.observe.joint_ops import slim
from rankscope.backends.work.flight_recorder import recorder
from tests.backends.observe.late_runs import Run


def left(run: Run, rank: int) -> dict[str, Any]:
    """Return what a rank of `run` leaves."""
    dump = run.dumps()[rank]
    records = [slim(one) for one in dump["records"]]
    # As other ranks read it.
    kept: dict[str, Any] = json.loads(json.dumps({**dump, "records": records}))
    return kept


@pytest.fixture
def meetings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[int, Meeting]]:
    """Three ranks of a host."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # A process sees none of its own locks: the first rank would seem to be dead.
    monkeypatch.setattr(meeting_module, "_remove_unless_used", lambda folder: None)
    made = {rank: Meeting("job", rank) for rank in range(3)}
    yield made
    for one in made.values():
        one.close()


def said(meetings: dict[int, Meeting], run: Run) -> list[str]:
    """Return what the ranks say that end one after the other."""
    found = [last_line(one, left(run, rank)) for rank, one in meetings.items()]
    return [one for one in found if one]


def late(ranks: int = 3) -> Run:
    return Run(ranks, heavy=0.1).steps(61, lambda n, rank: 21 if rank == 1 else 1)


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    alive = {0, 1, 2}
    monkeypatch.setattr(Meeting, "lives", lambda self, rank: rank in alive)
    return alive


@pytest.mark.usefixtures("living")
def test_the_last_rank_says_who_was_late(meetings: dict[int, Meeting]) -> None:
    (line,) = said(meetings, late())
    assert line.startswith(
        "late rank: rank 1 is last to enter all_reduce at cell 7 line 9, 60 of 60 "
        "times: the others wait 20 ms each time"
    )
    # A rank that comes at the same time.
    assert last_line(meetings[0], left(late(), 0)) == ""


@pytest.mark.usefixtures("living")
def test_nothing_is_said_where_nothing_is_certain(meetings: dict[int, Meeting]) -> None:
    assert said(meetings, Run(3).steps(61)) == []


def test_nobody_waits_for_a_rank_that_died(
    meetings: dict[int, Meeting], living: set[int]
) -> None:
    run = late()
    assert last_line(meetings[0], left(run, 0)) == ""
    living.discard(2)
    # Its ops are not known, and so nobody is named.
    assert last_line(meetings[1], left(run, 1)) == ""


@pytest.mark.usefixtures("living")
def test_ranks_of_other_hosts_are_not_known(meetings: dict[int, Meeting]) -> None:
    assert said(meetings, late(4)) == []


@pytest.mark.usefixtures("group")
def test_a_rank_leaves_a_bounded_number_of_ops() -> None:
    import rankscope.backends as dist

    for _ in range(LAST // 100):
        dist.barrier(async_op=True)
    ops = last_ops(last=4)
    assert len(ops["records"]) == 4
    assert {*ops["records"][0]} == {*slim(recorder.dump()[0])}
    assert len(json.dumps(ops["records"][0])) < 500
