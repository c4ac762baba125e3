"""Texts of one job together, and beside its dumps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.observe.verdicts import Fault
from rankscope.backends.post_mortem.report import examine
from rankscope.backends.post_mortem.trace import trace
from tests.backends.post_mortem.test_error_file import MESSAGE
from tests.backends.post_mortem.test_log import GLOO, hung, of_gloo
from tests.backends.post_mortem.test_stacks import FAULTHANDLER, PY_SPY

CASES = Path(__file__).parents[4] / "shared" / "post_mortem"


def dump(rank: int, last: int, size: int = 4) -> dict[str, Any]:
    """Return a Flight Recorder dump whose rank has issued all_reduces up to `last`."""
    start = 1_700_000_000_000_000_000 + (rank == 3) * 60_000_000_000
    entries = [
        {
            "record_id": n,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": n,
            "p2p_seq_id": 0,
            "op_id": n,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": start + n * 1_000_000,
            "time_discovered_started_ns": start + n * 1_000_000 + 1000,
            "time_discovered_completed_ns": (
                start + n * 1_000_000 + 500_000 if n < 13 else None
            ),
            "input_sizes": [[64, 64]],
            "input_dtypes": ["Float"],
            "output_sizes": [[64, 64]],
            "output_dtypes": ["Float"],
            "state": "completed" if n < 13 else "started",
            "retired": n < 13,
            "timeout_ms": 600000,
            "is_p2p": False,
            "frames": [{"filename": "/job/train.py", "name": "step", "line": 88}],
        }
        for n in range(1, last + 1)
    ]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(size)])}}
    status = {"0": dict.fromkeys(("last_enqueued_collective",), last)}
    return {
        "version": "2.10",
        "rank": rank,
        "pg_config": config,
        "pg_status": status,
        "entries": entries,
    }


@pytest.fixture
def job(tmp_path: Path) -> Path:
    for rank in range(4):
        text = json.dumps(dump(rank, 12 if rank == 2 else 13))
        (tmp_path / f"rank_{rank}.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "kind", "line"),
    [
        ("rank_2.stack", PY_SPY, "py-spy stacks", "data.py:77"),
        ("rank_2.stack", FAULTHANDLER, "faulthandler stacks", "train.py:88"),
    ],
)
def test_a_stack_says_where_the_missing_rank_is(
    job: Path, name: str, text: str, kind: str, line: str
) -> None:
    (job / name).write_text(text)
    report = examine([job])
    (verdict,) = report.verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_BUSY_ELSEWHERE, (2,))
    assert f"it is at {line} in " in verdict.text
    kinds = {Path(one.path).name: one.kind for one in report.files}
    assert kinds[name] == kind


def test_an_error_file_says_why_the_missing_rank_is_missing(job: Path) -> None:
    (job / "rank2").mkdir()
    (job / "rank2" / "error.json").write_text(json.dumps({"message": MESSAGE}))
    (verdict,) = examine([job]).verdicts
    assert verdict.culprits == (2,)
    assert "ValueError: batch 3 is empty at data.py:77" in verdict.text


def test_torchruns_folder_of_logs(tmp_path: Path) -> None:
    """Its folders are those of local ranks; what is beside a log is of its rank."""
    for local in range(2):
        folder = tmp_path / "job" / "attempt_0" / str(local)
        folder.mkdir(parents=True)
        text = GLOO.format(p=f"[rank{8 + local}]: ", file="train.py", line=88)
        (folder / "stderr.log").write_text(text if local == 0 else "[rank9]: bye\n")
        (folder / "stdout.log").write_text("")
    (folder / "error.json").write_text(json.dumps({"message": MESSAGE}))
    report = examine([tmp_path])
    (verdict,) = report.verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_DEAD, (9,))
    assert verdict.waiting == (8,)
    assert "stdout" not in report.as_text()


def test_a_log_beside_the_dumps_tells_of_the_same_group(job: Path) -> None:
    (job / "torchrun.log").write_text("\n".join(hung()))
    report = examine([job])
    assert [one.culprits for one in report.verdicts] == [(2,)]
    assert [one.name for one in report.evidence.groups] == ["default_pg"]
    (job / "rank_0.json").unlink()
    assert [one.culprits for one in examine([job]).verdicts] == [(2,)]


def test_stacks_alone_say_where_the_ranks_are(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}").write_text(FAULTHANDLER)
    (tmp_path / "rank_3").write_text(PY_SPY)
    report = examine([tmp_path])
    assert report.verdicts == ()
    assert report.as_text() == (
        "rank 3 is at data.py:77 in __next__ of torch/utils/data/dataloader.py\n"
        "ranks 0–2 are at train.py:88 in all_reduce of "
        "torch.distributed"
    )


def test_stacks_in_a_helper_are_told_with_its_callers(tmp_path: Path) -> None:
    for rank in range(3):
        text = FAULTHANDLER.replace("line 120", f"line {120 + rank % 2}")
        (tmp_path / f"rank_{rank}").write_text(text)
    called = "all_reduce of torch.distributed"
    assert examine([tmp_path]).as_text().splitlines() == [
        f"rank 1 is at train.py:88, called at train.py:121 in {called}",
        f"ranks 0, 2 are at train.py:88, called at train.py:120 in {called}",
    ]


def test_the_newest_of_several_stacks_counts(tmp_path: Path) -> None:
    later = PY_SPY.replace("    wait (", "    read (").replace(
        "data.py:77", "data.py:79"
    )
    for second, text in enumerate((PY_SPY, later, FAULTHANDLER)):
        path = tmp_path / f"dump_{9 - second}" / "rank_3"
        path.parent.mkdir()
        path.write_text(text)
        os.utime(path, (1000 + second, 1000 + second))
    (one,) = examine([tmp_path]).evidence.ranks.values()
    assert str(one.location) == "train.py:88"
    # Line and call are those of one file.
    (tmp_path / "dump_7" / "rank_3").write_text(
        "Thread 0x00007ff8a2ca9b80 (most recent call first):\n"
        '  File "/job/train.py", line 91 in step\n'
    )
    (one,) = examine([tmp_path]).evidence.ranks.values()
    assert (str(one.location), one.called) == ("train.py:91", None)


def test_what_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("epoch 3\n")
    (tmp_path / "b.bin").write_bytes(b"\0[rank3]:" * 10)
    (tmp_path / "c").write_bytes(b"")
    report = examine([tmp_path])
    assert {one.kind for one in report.files} == {"other"}
    assert all(one.problem for one in report.files)


def test_the_trace_moves_clocks_that_differ(job: Path) -> None:
    _, *of_ranks, _ = pieces = [*trace(examine([job], times=True).evidence)]
    assert len(of_ranks) == 4  # a thousand ranks need not be in memory at once
    found = json.loads("".join(pieces))
    offset = found["otherData"]["clock_offsets_ns"]
    assert (offset["0"], offset["3"]) == (0, 60_000_000_000)
    names = {one["name"] for one in found["traceEvents"] if one["ph"] in "XB"}
    assert {"all_reduce #12", "all_reduce #13"} <= names
    open_bars = [one["pid"] for one in found["traceEvents"] if one["ph"] == "B"]
    assert sorted(open_bars) == [0, 1, 3]


@pytest.mark.skipif(not CASES.is_dir(), reason="the cases of dead jobs are not here")
def test_the_log_of_the_cases() -> None:
    truth = json.loads((CASES / "cases.json").read_text())["log_missing_rank"]
    (verdict,) = examine([CASES / "cases" / "log_missing_rank"]).verdicts
    assert verdict.fault.value == truth["kind"]
    assert list(verdict.culprits) == truth["culprits"]
    assert (verdict.op, verdict.group.name) == (truth["op"], truth["group"])


def test_where_a_rank_was_is_told_beside_the_timeouts_of_the_others(
    tmp_path: Path,
) -> None:
    """Gloo leaves nothing else: the stack may be from some time before."""
    (tmp_path / "job.log").write_text(of_gloo((0, 1, 3)))
    stack = (
        "Thread 0x00007ff8a2ca9b80 (most recent call first):\n"
        '  File "/job/data.py", line 77 in load\n'
        '  File "/job/train.py", line 120 in <module>\n'
    )
    (tmp_path / "rank_2").write_text(stack)
    (verdict,) = examine([tmp_path]).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    assert verdict.text == (
        "ranks 0–1, 3 gave up waiting at train.py:88 in all_reduce of "
        "torch.distributed; rank 2 was at data.py:77, by its stack"
    )


@pytest.mark.parametrize("name", ["FR Trace", "TorchComms FR Trace"])
def test_the_tables_of_torchs_debug_server_are_refused(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "fr_trace_20261127_074341.txt"
    path.write_text(
        "PARTIAL DATA: 1/2 workers responded\n  Rank 1: timed out\n\n"
        f"=== {name} ===\n--- Groups ---\n0  default_pg  2\n--- Collectives ---\n"
    )
    (file,) = examine([tmp_path]).files
    assert file.kind == "tables of torch's debug server"
    assert "TORCH_FR_DUMP_TEMP_FILE" in file.problem
    assert "rankscope diagnose --jobs" in file.problem
