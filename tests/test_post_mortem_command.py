"""``rankscope diagnose PATH``: what it prints, its exit status, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankscope.__main__ import main
from tests.backends.post_mortem.dumps import Rank, write


def job(folder: Path, missing: int | None = None) -> Path:
    """Write what three ranks leave of which one may be `missing` from the last op."""
    ranks = [Rank(rank, {"default_pg": range(3)}) for rank in range(3)]
    for one in ranks:
        one.issue_many(2)
        if missing is not None and one.rank != missing:
            one.issue(line=31, done=False)
    return write(folder, ranks)


def test_it_says_who_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(job(tmp_path, 1))]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith(
        "missing ranks: rank 1 has not entered all_reduce #3 (train.py:31): it issued "
        "all_reduce #2 (train.py:10) last; ranks 0, 2 wait in it"
    )
    assert "read: ranks 0–2 of 3" in out.splitlines()


def test_it_says_that_nothing_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(job(tmp_path))]) == 0
    assert capsys.readouterr().out.startswith("nothing hangs")


def test_the_json_is_all_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job(tmp_path, 1)
    (folder / "notes.txt").write_text("x")
    assert main(["diagnose", "--json", str(folder)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdicts"][0]["culprits"] == [1]
    assert found["world_size"] == 3
    assert found["files"][-1]["kind"] == "other"


def test_a_path_wins_over_the_name_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job(tmp_path / "rankscope-aa11", 2)
    assert main(["diagnose", "rankscope-aa11"]) == 1
    assert "rank 2 has not entered" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["no/such/folder", "./none"])
def test_a_path_that_does_not_exist(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", name]) == 2
    assert f"no such file or folder: {name!r}" in capsys.readouterr().err


def test_what_was_looked_for_is_told_where_nothing_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "no file is there; looked for Flight Recorder" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("hello")
    assert main(["diagnose", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "a.txt: nothing that is known" in printed.out
    assert "no file of 1 tells of a rank" in printed.err


def test_what_files_hold_cannot_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [Rank(rank, {"\x1b[2Jevil": range(2)}) for rank in range(2)]
    ranks[0].issue(group="\x1b[2Jevil", done=False)
    assert main(["diagnose", str(write(tmp_path, ranks))]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_json_is_for_paths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--json"]) == 2
    assert "--json is for a PATH" in capsys.readouterr().err


def test_the_help_tells_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diagnose", "--help"])
    out = capsys.readouterr().out
    for word in ("PATH", '"sequence_number"', "exit status", "archive"):
        assert word in out
