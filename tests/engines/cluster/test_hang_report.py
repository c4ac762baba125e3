"""A cell that nobody ends: the ranks of the cluster leave a report, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.verdicts import Fault
from rankscope.engines import Cluster, Execution

pytestmark = pytest.mark.processes

WAIT = 60.0
#: Line 5 is where rank 1 is, and line 6 where rank 0 waits.
CODE = """import os, time
x = np.ones(4)
dist.all_reduce(x)
while rank == 1 and not os.path.exists({!r}):
    time.sleep(0.01)
dist.all_reduce(x)
"""


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RANKSCOPE_REPORT", str(tmp_path / "reports"))
    monkeypatch.setenv("RANKSCOPE_REPORT_AFTER", "2")
    return tmp_path / "reports"


@pytest.fixture
def cluster(reports: Path) -> Iterator[Cluster]:
    with Cluster(2) as started:
        yield started


def said(cell: Execution) -> list[str]:
    outputs = [*cell.outputs(0), *cell.outputs(1)]
    return [one["text"] for one in outputs if one.get("name") == "stdout"]


def test_a_cell_that_nobody_ends(
    cluster: Cluster, reports: Path, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    cell = cluster.execute(CODE.format(str(go_on)), cell=7)
    until(lambda: bool(said(cell)), WAIT)
    # It has had the time to say it twice.
    again = cluster.execute("1", cell=8)
    go_on.touch()
    cell.result(WAIT)
    again.result(WAIT)
    (text,) = said(cell)
    (folder,) = reports.iterdir()
    (found,) = json.loads((folder / "verdict.json").read_text())["verdicts"]
    assert text == f"rankscope: {found['text']}; the report is {folder}\n"
    assert found["kind"] == Fault.RANK_BUSY_ELSEWHERE.value
    assert (found["culprits"], found["line"]) == ([1], "cell 7 line 6")
    assert "it is at cell 7 line 5" in found["text"]
    assert 'File "cell 7", line 6' in (folder / "stacks_rank_0.txt").read_text()
    assert (folder / "report.html").stat().st_size
    # A rank in a fresh process takes part, and so do both when they have other ranks.
    cluster.restart(1)
    cluster.rebuild()
    go_on.unlink()
    cell = cluster.execute(CODE.format(str(go_on)), cell=9)
    until(lambda: bool(said(cell)), WAIT)
    go_on.touch()
    cell.result(WAIT)
    (second,) = set(reports.iterdir()) - {folder}
    (found,) = json.loads((second / "verdict.json").read_text())["verdicts"]
    assert (found["culprits"], found["line"]) == ([1], "cell 9 line 6")
