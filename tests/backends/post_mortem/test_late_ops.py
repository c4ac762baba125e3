"""Who kept the others waiting, by what the ranks of a job have left in files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from rankscope.__main__ import main
from rankscope.backends.observe.torch_format import flight_recorder
from rankscope.backends.post_mortem.report import examine
from rankscope.widgets.report.page import report_page
from tests.backends.observe.late_runs import Run
from tests.backends.post_mortem.dumps import Rank

#: What a record has in addition to those of a `Run`.
_MORE: dict[str, Any] = {
    **{"op_id": 0, "peer": None, "timeout": 60.0, "error": None, "duration_ns": 1},
    **{"dtypes": ["float32"], "tag": None, "reduce_op": "sum"},
}


def written(
    folder: Path, run: Run, *, hosts: bool = False, **fields: Any
) -> dict[int, dict[str, Any]]:
    """Write the dumps of a run; return them."""
    dumps = {}
    for rank, dump in run.dumps().items():
        frame = {"file": "train.py", "line": 88, "function": "step"}
        records = [
            {**one, **_MORE, "record_id": number, **fields}
            | {"frame": {**frame, "source": "train.py:88"}}
            for number, one in enumerate(dump["records"])
        ]
        form = flight_recorder(rank, dump["groups"], records)
        if hosts:
            form["host"] = f"node{rank // 2}"
        dumps[rank] = form
        (folder / f"trace_rank_{rank}").write_bytes(pickle.dumps(form, 2))
    return dumps


def late(clocks: dict[int, float] | None = None) -> Run:
    run = Run(heavy=0.1, clocks=clocks or {})
    return run.steps(61, lambda n, rank: 21.0 if rank == 2 else 1.0)


def test_nothing_hangs_and_the_table_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, late())
    assert main(["diagnose", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    said = "late rank: rank 2 is last to enter all_reduce at train.py:88, 60 of 60 "
    assert said in text
    assert "group 'default' (ranks 0–3), 60 collectives:\nrank " in text
    assert "60 of 60" in text.splitlines()[-2]
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["late"]
    assert (found["kind"], found["ranks"], found["of"]) == ("late rank", [2], 60)
    assert 0.019 < found["wait"] < 0.021
    page = report_page(examine([tmp_path]), "job")
    assert "Who kept the others waiting" in page
    assert "rank 2 is last to enter all_reduce" in page


def test_it_stands_beside_the_verdict_of_a_hang(tmp_path: Path) -> None:
    run = late()
    for rank in (0, 1, 3):
        now = run.now[rank]
        run.add(rank, "all_reduce", now, now, state="started", time_ended_ns=0)
    written(tmp_path, run)
    report = examine([tmp_path])
    (verdict,) = report.verdicts
    assert verdict.culprits == (2,)
    hangs, read, when, said = report.as_text().splitlines()
    assert (hangs.split(":")[0], read) == ("missing ranks", "read: ranks 0–3 of 4")
    assert when.startswith("nothing tells when the dumps were written: ")
    assert said.startswith("late rank: rank 2 is last")


def test_healthy_ranks_have_no_line_beside_a_verdict(tmp_path: Path) -> None:
    run = Run().steps(61)
    for rank in (0, 1, 3):
        now = run.now[rank]
        run.add(rank, "all_reduce", now, now, state="started", time_ended_ns=0)
    written(tmp_path, run)
    report = examine([tmp_path])
    assert len(report.as_text().splitlines()) == 3
    assert "late rank" not in report.as_text()
    assert "Who kept" not in report_page(report, "job")


@pytest.mark.parametrize("hosts", [True, False])
def test_clocks_of_hosts_may_differ(tmp_path: Path, hosts: bool) -> None:
    dumps = written(tmp_path, late({2: 3000.0, 3: 3000.0}), hosts=hosts)
    if not hosts:
        for rank, one in dumps.items():
            # Of an older version: each rank may be on a host of its own.
            del one["host"]
            (tmp_path / f"trace_rank_{rank}").write_bytes(pickle.dumps(one, 2))
    (group,) = examine([tmp_path]).late
    (found,) = group.findings
    assert found.ranks == (2,)
    assert found.wait == pytest.approx(0.02, abs=0.002)


def test_dumps_of_torch_do_not_tell(tmp_path: Path) -> None:
    for rank in range(4):
        one = Rank(rank, {"default_pg": range(4)})
        one.issue_many(40, line=88)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(one.dump(), 2))
    assert examine([tmp_path]).late == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"time_waited_ns": "never"},
        {"time_waited_ns": None},
        {"backend": 7},
        {"input_sizes": [3]},
        {"splits": 4},
        {"time_discovered_completed_ns": "x"},
    ],
)
def test_values_of_other_types_blame_nobody(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    dumps = written(tmp_path, late())
    for rank, one in dumps.items():
        one["entries"] = [{**entry, **wrong} for entry in one["entries"]]
        (tmp_path / f"trace_rank_{rank}").write_bytes(pickle.dumps(one, 2))
    named = [x.ranks for group in examine([tmp_path]).late for x in group.findings]
    assert named in ([], [(2,)])
