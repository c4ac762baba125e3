"""``rankscope diagnose PATH --html FILE --trace FILE``, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankscope.__main__ import main
from tests.backends.post_mortem.test_log import hung
from tests.backends.post_mortem.test_stacks import PY_SPY


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "torchrun.log").write_text("\n".join(hung()))
    return folder


def test_the_page_and_the_trace_are_written(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = job.parent / "report.html", job.parent / "trace.json"
    arguments = ["diagnose", str(job), "--html", str(page), "--trace", str(trace)]
    assert main([*arguments, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["verdicts"][0]["culprits"] == [2]
    assert "report.html written" in err
    assert "Rank 2 has not entered all_reduce #13" in page.read_text()
    # A log has no times of ops.
    assert json.loads(trace.read_text())["traceEvents"] == []


def test_a_page_that_cannot_be_written(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(job), "--html", str(job / "no" / "report.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_stacks_alone_are_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank_3").write_text(PY_SPY)
    assert main(["diagnose", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("rank 3 is at data.py:77 in __next__ of torch/utils/data/")
    assert "do not tell in which ops the ranks were" in err


def test_nothing_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("epoch 3")
    assert main(["diagnose", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    for kind in ("torchrun log", "py-spy stacks", "faulthandler stacks", "NCCL RAS"):
        assert kind in err


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_the_options_are_for_files(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", "no-such-cluster", option, "x"]) == 2
    assert f"{option} is for a PATH" in capsys.readouterr().err
