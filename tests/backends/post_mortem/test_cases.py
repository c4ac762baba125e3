"""The cases of hung jobs that are kept beside the repository, if they are there."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.post_mortem.report import Report, examine
from tests.backends.post_mortem.other_places import in_other_places

_HERE = Path(__file__).resolve().parents[3]
_FOLDER = _HERE.parent / "shared" / "post_mortem"
pytestmark = pytest.mark.skipif(
    not _FOLDER.is_dir(), reason="the folder with the cases is not here"
)

_CASES: dict[str, Any] = (
    json.loads((_FOLDER / "cases.json").read_text()) if _FOLDER.is_dir() else {}
)


def told(report: Report) -> list[tuple[str, list[int], str, str]]:
    found = report.as_dict()["verdicts"]
    return [(one["kind"], one["culprits"], one["op"], one["group"]) for one in found]


def assert_right(report: Report, truth: dict[str, Any]) -> None:
    kinds = [truth["kind"], *truth["accept"]] if truth["kind"] else []
    allowed = [
        [(kind, truth["culprits"], truth["op"], truth["group"])] for kind in kinds
    ] or [[]]
    assert told(report) in allowed


@pytest.mark.parametrize("name", _CASES)
def test_a_case_is_told_as_it_is(name: str) -> None:
    assert_right(examine([_FOLDER / "cases" / name]), _CASES[name])


@pytest.mark.parametrize("name", _CASES)
def test_names_order_and_archives_change_nothing(name: str, tmp_path: Path) -> None:
    """Files of other names' order, one by one, and as members of archives."""
    files = sorted((_FOLDER / "cases" / name).iterdir())
    places = in_other_places(files, tmp_path, name)
    random.Random(name).shuffle(files)
    for paths in (files, *([one] for one in places)):
        assert_right(examine(paths), _CASES[name])


def test_a_pickle_that_names_a_class_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = examine([_FOLDER / "cases" / "24_dump_malicious"])
    refused = [one for one in report.files if one.problem]
    assert [Path(one.path).name for one in refused] == ["nccl_trace_rank_6"]
    assert "posix.system" in refused[0].problem
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpu_error_1st", "execution hang"), ("lock_gil_1st", "missing ranks")],
)
def test_the_ranks_that_were_hit_are_named_of_16_gpus(name: str, kind: str) -> None:
    folder = _FOLDER / "megatron_16_gpus" / name
    first = (folder / "fault_injection.log").read_text().splitlines()[0]
    hit = json.loads(first.removeprefix("Fault ranks: "))
    report = examine([folder])
    assert [(one[0], one[1]) for one in told(report)] == [(kind, hit)]
