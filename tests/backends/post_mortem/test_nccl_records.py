"""How torch records ops of NCCL that are not one collective with two arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.observe.verdicts import Fault
from rankscope.backends.post_mortem.report import Report, examine
from tests.backends.post_mortem.dumps import Rank, write

WORLD: dict[str, Sequence[int]] = {"default_pg": range(4)}
#: The ops of a batch, none where they are not listed, and the entry that ends it.
BATCHES = [
    ((), "coalesced"),
    (("broadcast",), "coalesced"),
    (("all_gather", "all_gather"), "coalesced"),
    # An all_gather and a reduce_scatter of parts that differ in size.
    (("_broadcast_oop",) * 4, "ALLGATHER_coalesced"),
    ((), "REDUCE_SCATTER_coalesced"),
]
active_or_all = pytest.mark.parametrize("active_only", [False, True])
of_batches = pytest.mark.parametrize(("ops", "closing"), BATCHES)


def ranks() -> list[Rank]:
    return [Rank(rank, WORLD) for rank in range(4)]


def judge(folder: Path, found: list[Rank], active_only: bool) -> Report:
    return examine([write(folder, found, active_only=active_only)])


def assert_blames(report: Report, *culprits: int, fault: Fault) -> None:
    assert [(one.fault, one.culprits) for one in report.verdicts] == [(fault, culprits)]


@active_or_all
@pytest.mark.parametrize("late", [0, 3])
def test_the_root_alone_has_the_parts_of_a_scatter(
    tmp_path: Path, late: int, active_only: bool
) -> None:
    """What a rank receives is its input there, and the parts are the output."""
    found = ranks()
    for one in found:
        one.issue_many(3)
        if one.rank != late:
            entry = one.issue("scatter", done=False)
            is_root = one.rank == 1
            entry["output_sizes"] = [[64]] * 4 if is_root else [[0]]
            entry["output_dtypes"] = ["Float"] * 4 if is_root else ["Undefined"]
    report = judge(tmp_path, found, active_only)
    assert_blames(report, late, fault=Fault.MISSING_RANKS)


@pytest.mark.parametrize(
    ("how", "fault"),
    [({"size": 8}, Fault.SIZE_MISMATCH), ({"dtype": "Half"}, Fault.DTYPE_MISMATCH)],
)
def test_a_scatter_of_another_size_or_dtype(
    tmp_path: Path, how: dict[str, Any], fault: Fault
) -> None:
    found = ranks()
    for one in found:
        entry = one.issue("scatter", done=False, **(how if one.rank == 2 else {}))
        entry["output_sizes"] = [[64]] * 4 if one.rank == 0 else [[0]]
        entry["output_dtypes"] = ["Float"] * 4 if one.rank == 0 else ["Undefined"]
    assert_blames(judge(tmp_path, found, False), 2, fault=fault)


@active_or_all
@of_batches
def test_who_has_not_come_to_a_batch_of_collectives(
    tmp_path: Path, ops: tuple[str, ...], closing: str, active_only: bool
) -> None:
    found = ranks()
    for one in found:
        one.issue_many(3)
        if one.rank != 3:
            one.issue_batch(*ops, done=False, closing=closing)
    report = judge(tmp_path, found, active_only)
    assert_blames(report, 3, fault=Fault.MISSING_RANKS)
    assert report.verdicts[0].seq == 4


@active_or_all
@of_batches
def test_a_batch_that_is_over_hangs_nowhere(
    tmp_path: Path, ops: tuple[str, ...], closing: str, active_only: bool
) -> None:
    found = ranks()
    for one in found:
        one.issue_many(3)
        one.issue_batch(*ops, closing=closing)
    assert judge(tmp_path / "over", found, active_only).verdicts == ()
    for one in found:
        if one.rank != 2:
            one.issue("all_reduce", done=False)
    report = judge(tmp_path / "later", found, active_only)
    assert_blames(report, 2, fault=Fault.MISSING_RANKS)
    assert report.verdicts[0].op == "all_reduce"


@active_or_all
@of_batches
def test_another_op_in_place_of_a_batch(
    tmp_path: Path, ops: tuple[str, ...], closing: str, active_only: bool
) -> None:
    found = ranks()
    for one in found:
        one.issue_many(3)
        if one.rank == 1:
            one.issue("all_reduce", done=False)
        else:
            one.issue_batch(*ops, done=False, closing=closing)
    report = judge(tmp_path, found, active_only)
    assert_blames(report, 1, fault=Fault.OP_MISMATCH)


def test_sends_of_a_batch_that_the_ring_has_lost(tmp_path: Path) -> None:
    """The entry that ends a batch of sends and receives is no collective."""
    found = ranks()
    for one in found:
        one.issue("send", peer=(one.rank + 1) % 4)
        entry = one.issue("coalesced", done=False)
        entry.update(collective_seq_id=0, p2p_seq_id=1)
        del one.entries[0]
    report = judge(tmp_path, found, False)
    assert [one for one in report.verdicts if one.culprits] == []
