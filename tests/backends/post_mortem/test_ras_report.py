"""Reports of NCCL's RAS service that somebody has saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.observe.verdicts import Fault
from rankscope.backends.post_mortem.evidence_file import RawFile, UnreadableError
from rankscope.backends.post_mortem.ras_report import RasReader
from rankscope.backends.post_mortem.report import examine
from tests.backends.nccl.ras_service import JSON, TEXT, missing, rank, report


def saved(tmp_path: Path, text: str) -> Any:
    (tmp_path / "ras.txt").write_text(text)
    return examine([tmp_path])


@pytest.mark.parametrize("text", [JSON, TEXT], ids=["json", "text"])
def test_a_rank_that_is_behind(tmp_path: Path, text: str) -> None:
    found = saved(tmp_path, text)
    assert found.files[0].kind == "NCCL RAS"
    (verdict,) = found.verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (1,))
    assert (verdict.op, verdict.seq) == ("all_reduce", 15)
    assert found.evidence.ranks[0].process == "pid 100"


def test_the_comma_that_2_28_9_leaves_out(tmp_path: Path) -> None:
    text = JSON.replace('"nvml_dev": 2,', '"nvml_dev": 2')
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(text)
    assert saved(tmp_path, text).verdicts[0].culprits == (1,)


def test_a_dead_process(tmp_path: Path) -> None:
    lost = missing(2, 102, unresponsive=True, dead=True)
    text = json.dumps(report([rank(0, 100, 15), rank(1, 101, 15)], [lost]))
    found = saved(tmp_path, text)
    assert found.evidence.ranks[2].death == "rank 2 is dead, as NCCL's RAS reports"


def test_ops_of_different_functions(tmp_path: Path) -> None:
    other = rank(2, 102, 14)
    other["collective_counts"]["Broadcast"] = 1
    ranks = [rank(0, 100, 15), rank(1, 101, 15), other]
    (verdict,) = saved(tmp_path, json.dumps(report(ranks, []))).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.OP_MISMATCH, (2,))


def test_all_alike_is_no_hang(tmp_path: Path) -> None:
    ranks = [rank(n, 100 + n, 15) for n in range(3)]
    assert saved(tmp_path, json.dumps(report(ranks, []))).verdicts == ()


def test_ranks_of_a_part_of_the_job_are_not_known() -> None:
    one = report([rank(0, 100, 15), rank(1, 101, 14)], [])
    other = report([rank(0, 102, 15), rank(1, 103, 15)], [])
    one["communicators"] += other["communicators"]
    with pytest.raises(UnreadableError, match="no communicator in it has all"):
        RasReader().read(RawFile("ras.json", json.dumps(one).encode()))


def job(*counts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return a report of 8 ranks, whose pids are alike on two hosts.

    Each communicator is a list of the job's ranks with their counts.
    """
    found = [report([], [])["communicators"][0] for _ in counts]
    for number, (one, members) in enumerate(zip(found, counts, strict=True)):
        one.update(hash=f"0x{number}", size=len(members))
        for place, (member, count) in enumerate(members):
            about = rank(place, 100 + member % 4, count)
            about.update(host=f"10.0.0.{member // 4}", cuda_dev=member % 4)
            one["ranks"].append(about)
    return {**report([], []), "communicators": found}


@pytest.mark.parametrize("ahead", [0, 1])
def test_whose_process_a_rank_of_a_part_of_the_job_is(
    tmp_path: Path, ahead: int
) -> None:
    everyone = [(one, 50 + ahead * (one not in (2, 6))) for one in range(8)]
    pairs = [[(one, 10), (one + 4, 10 - (one == 2))] for one in range(4)]
    (verdict,) = saved(tmp_path, json.dumps(job(*pairs, everyone))).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (6,))
    assert (verdict.group.ranks, verdict.seq) == ((2, 6), 10)


def test_a_rank_that_may_wait_elsewhere_is_not_blamed(tmp_path: Path) -> None:
    """Ranks 2 and 6 are behind: which one holds the other, counts do not tell."""
    everyone = [(one, 50) for one in range(8)]
    rows = [[(one, 10 - (one in (2, 6))) for one in range(n, n + 4)] for n in (0, 4)]
    assert saved(tmp_path, json.dumps(job(*rows, everyone))).verdicts[0].culprits == ()


def test_where_a_process_is_dead_who_is_behind_may_wait_for_it(tmp_path: Path) -> None:
    found = job([(one, 50 - (one in (4, 5))) for one in range(8) if one != 6])
    pair = job([(4, 10), (5, 10)])
    found["communicators"] += pair["communicators"]
    lost = {**missing(6, 102, unresponsive=True, dead=True), "host": "10.0.0.1"}
    for one, size in zip(found["communicators"], (8, 3), strict=True):
        place = {"rank": 2 if size == 3 else 6, "cuda_dev": 2}
        one.update(size=size, missing_ranks=[{**lost, **place}], missing_ranks_count=1)
    for number, about in enumerate(found["communicators"][0]["ranks"]):
        about["rank"] = number + (number > 5)
    (verdict,) = saved(tmp_path, json.dumps(found)).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_DEAD, (6,))


def test_processes_of_one_number_on_two_hosts() -> None:
    """None of them is the communicator of all, although each has all the numbers."""
    halves = [[(one, 10) for one in range(4)], [(one, 10) for one in range(4, 8)]]
    with pytest.raises(UnreadableError, match="no communicator in it has all"):
        RasReader().read(RawFile("ras.json", json.dumps(job(*halves)).encode()))


@pytest.mark.parametrize("cut", range(100, len(JSON), 97))
def test_a_report_that_was_cut(cut: int) -> None:
    file = RawFile("ras.json", JSON[:cut].encode())
    assert RasReader().recognises(file)
    with pytest.raises(UnreadableError, match="cannot be read"):
        RasReader().read(file)
