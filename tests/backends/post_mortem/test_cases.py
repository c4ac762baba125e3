"""The collection of dumps with their truth, where it lies beside the repository."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.post_mortem.report import examine

COLLECTION = Path(__file__).parents[4] / "shared" / "post_mortem"
CASES: dict[str, dict[str, Any]] = (
    json.loads((COLLECTION / "cases.json").read_text()) if COLLECTION.exists() else {}
)
REAL = sorted(COLLECTION.glob("megatron_16_gpus/*")) if COLLECTION.exists() else []

pytestmark = pytest.mark.skipif(not CASES, reason="the collection is not here")


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_told_as_it_was(name: str) -> None:
    case = CASES[name]
    report = examine([COLLECTION / "cases" / name])
    verdicts = report.as_dict()["verdicts"]
    if not case["kind"]:
        assert verdicts == []
        return
    (verdict,) = verdicts
    assert verdict["kind"] in {case["kind"], *case["accept"]}
    assert verdict["culprits"] == case["culprits"]
    assert verdict["op"] == case["op"]
    assert verdict["group"] == case["group"]
    assert report.world_size in (case["world"], None)


@pytest.mark.parametrize("folder", REAL, ids=lambda one: one.name)
def test_the_ranks_with_an_injected_fault_are_named_and_no_other(folder: Path) -> None:
    log = (folder / "fault_injection.log").read_text()
    injected = re.search(r"Fault ranks: \[(.*)\]", log)
    assert injected is not None
    verdicts = examine([folder]).verdicts
    named = {rank for one in verdicts for rank in one.culprits}
    assert named == set(map(int, injected[1].split(",")))


def test_nothing_in_a_file_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    report = examine([COLLECTION / "cases" / "24_dump_malicious"])
    assert not list(tmp_path.iterdir())
    (refused,) = [one for one in report.files if "refused" in one.problem]
    assert refused.path.endswith("nccl_trace_rank_6")


def test_the_order_of_the_files_changes_nothing() -> None:
    for name in ("09_tp_dp_missing", "16_active_only_no_frames", "12_p2p_size"):
        files = sorted((COLLECTION / "cases" / name).iterdir())
        expected = examine(files).as_dict()["verdicts"]
        random.Random(name).shuffle(files)
        assert examine(files).as_dict()["verdicts"] == expected
