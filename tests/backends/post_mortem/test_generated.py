"""Random faults in random jobs: the diagnosis of their dumps names the right ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.post_mortem.generator import (
    diagnose,
    make_case,
    make_other,
    write,
)
from tests.backends.post_mortem.other_places import in_other_places
from tests.backends.post_mortem.truth import judge

_SEEDS = (*range(40), *range(100_000, 100_020))
#: Cases that were told wrong, by what they have in common.
_ONCE_WRONG = {
    "a counter of sends and receives": (11247, 13065, 12418),
    "ids of groups that only some ranks have": (11292, 13549),
    "a batch that needs a later send of the other side": (203944,),
    "a batch of one that is over": (10018, 11795),
    "dumps of a healthy job, read one after the other": (20382, 22187, 22465, 71835),
    "a dump that is older, among broadcasts": (100454,),
    "a rank without counters beside a lost host": (100527,),
    "most ranks without counters, and one whose GPU stopped": (90274,),
    "a certain culprit beside a group whose ids are not": (91425,),
    "a cycle of two of which other ranks tell the order": (300, 366, 22, 50),
}


def test_the_diagnosis_is_right_of_nearly_all_and_never_wrong_where_it_is_certain(
    tmp_path: Path,
) -> None:
    """At least 95 % right; no rank is named that the files do not blame."""
    results: dict[str, list[str]] = {}
    for seed in _SEEDS:
        case = make_case(seed)
        folder = write(case, tmp_path / str(seed))
        result = judge(case.truth, diagnose(folder)["verdicts"])
        results.setdefault(result, []).append(f"seed {seed}: {case.fault}")
    right = len(results.get("exact", [])) + len(results.get("right", []))
    assert "wrong" not in results, results["wrong"]
    assert right >= 0.95 * len(_SEEDS), results


@pytest.mark.parametrize("seed", [3, 17])
def test_a_case_is_made_from_its_seed_alone(seed: int) -> None:
    assert make_case(seed).files == make_case(seed).files


@pytest.mark.parametrize("kind", _ONCE_WRONG)
def test_kinds_of_cases_that_were_told_wrong(kind: str, tmp_path: Path) -> None:
    for seed in _ONCE_WRONG[kind]:
        case = make_case(seed)
        folder = write(case, tmp_path / str(seed))
        verdicts = diagnose(folder)["verdicts"]
        culprits = {rank for one in verdicts for rank in one["culprits"]}
        allowed = [one.must for one in case.truth.answers[:1]]
        assert judge(case.truth, verdicts) != "wrong", (seed, verdicts)
        if kind.startswith(("a cycle", "a certain")):
            assert culprits == set(*allowed), (seed, verdicts)


@pytest.mark.parametrize("kind", ["log", "ras"])
def test_a_log_or_a_report_of_ras_alone_names_no_innocent_rank(
    kind: str, tmp_path: Path
) -> None:
    """They tell less than dumps: that nothing certain is known is no fault."""
    named = 0
    for seed in range(30):
        case = make_other(kind, seed)
        verdicts = diagnose(write(case, tmp_path / str(seed)))["verdicts"]
        culprits = {rank for one in verdicts for rank in one["culprits"]}
        allowed = [one.may for one in case.truth.answers]
        assert culprits <= set().union(*allowed), (seed, case.fault, verdicts)
        named += bool(culprits)
    assert named >= (12 if kind == "log" else 7)


@pytest.mark.parametrize("seed", [2, 100_003, 100_011])
def test_order_folders_and_archives_change_nothing(seed: int, tmp_path: Path) -> None:
    folder = write(make_case(seed), tmp_path / "whole")
    expected = diagnose(folder)["verdicts"]
    for path in in_other_places(folder.iterdir(), tmp_path, seed):
        assert diagnose(path)["verdicts"] == expected
