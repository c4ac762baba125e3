"""Rankscope's own records of a job: a group is named with its first op."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.observe.verdicts import Fault
from rankscope.backends.post_mortem.rank_facts import FORM
from rankscope.backends.post_mortem.report import Report, examine
from tests.backends.post_mortem.dumps import Rank

GROUPS: dict[str, Sequence[int]] = {"default_pg": range(4), "three": range(3)}


def ranks() -> list[Rank]:
    return [Rank(rank, GROUPS) for rank in range(4)]


def as_ours(one: Rank) -> dict[str, Any]:
    """Return the dump with sends and receives in groups of their own."""
    content = one.dump()
    config: dict[str, dict[str, str]] = {}
    status: dict[str, dict[str, int]] = {}
    for entry in content["entries"]:
        number, text = entry["process_group"]
        name = text + " p2p" * entry["is_p2p"]
        ranks = content["pg_config"][number]["ranks"]
        config[name] = {"name": name, "desc": text, "ranks": ranks}
        entry.update(process_group=(name, text), backend="tcp")
        entry["pg_id"] = [*config].index(name)
        last = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        counts = status.setdefault(
            str(entry["pg_id"]), {"last_completed_collective": -1}
        )
        counts["last_enqueued_collective"] = last
        if entry["retired"]:
            counts["last_completed_collective"] = last
    return {**content, "pg_config": config, "pg_status": status}


def judge(folder: Path, found: Iterable[Rank]) -> Report:
    for one in found:
        path = folder / f"flight_recorder_rank_{one.rank}"
        path.write_bytes(pickle.dumps(as_ours(one), 2))
    return examine([folder])


def assert_blames(report: Report, *culprits: int, fault: Fault) -> None:
    assert [(one.fault, one.culprits) for one in report.verdicts] == [(fault, culprits)]


@pytest.mark.parametrize("sends", [0, 2])
def test_a_rank_that_has_not_used_the_group_in_which_others_wait(
    tmp_path: Path, sends: int
) -> None:
    """Rank 2 has sent its part of the reduce, and is ahead."""
    found = ranks()
    for one in found:
        one.issue_many(3)
    for _ in range(sends):
        found[0].issue("send", peer=1, group="three")
        found[1].issue("recv", peer=0, group="three")
    found[1].issue("reduce", group="three", done=False)
    found[2].issue("reduce", group="three")
    found[2].issue("all_reduce", group="three", done=False)
    assert_blames(judge(tmp_path, found), 0, fault=Fault.MISSING_RANKS)


def test_sends_between_collectives_date_no_rank(tmp_path: Path) -> None:
    """Their entries have the collectives' numbers, which say nothing of other ranks."""
    found = ranks()
    for one in found:
        one.issue_many(2)
    found[1].issue("send", peer=2)
    found[2].issue("recv", peer=1)
    for one in found[:3]:
        one.issue("barrier", done=False)
    found[2].issue("recv", peer=1, done=False)
    found[3].issue("recv", peer=2, done=False)
    assert_blames(judge(tmp_path, found), 2, 3, fault=Fault.DEADLOCK)


def test_a_group_that_a_rank_names_otherwise_is_not_unused(tmp_path: Path) -> None:
    found = ranks()
    for one in found[:3]:
        one.issue_many(2, group="three")
        one.issue(group="three", done=False)
    assert_blames(judge(tmp_path, found), 0, 1, 2, fault=Fault.EXECUTION_HANG)
    path = tmp_path / "flight_recorder_rank_1"
    path.write_bytes(path.read_bytes().replace(b"three", b"THREE"))
    assert [one for one in examine([tmp_path]).verdicts if one.culprits] == []


def test_ranks_wait_for_each_other_in_two_groups_of_the_same_ranks(
    tmp_path: Path,
) -> None:
    """Each names the group, too, in which it has issued nothing."""
    groups: dict[str, Sequence[int]] = {
        "default_pg": range(3),
        "a": range(2),
        "b": range(2),
    }
    found = [Rank(rank, groups) for rank in range(3)]
    found[0].issue(group="a", done=False)
    found[1].issue(group="b", done=False)
    found[2].issue("barrier", done=False)
    for one in found:
        content = as_ours(one)
        for name, members in groups.items():
            if one.rank in members:
                ranks = str(list(members))
                config = {"name": name, "desc": name, "ranks": ranks}
                content["pg_config"].setdefault(name, config)
        path = tmp_path / f"flight_recorder_rank_{one.rank}"
        path.write_bytes(pickle.dumps(content, 2))
    assert_blames(examine([tmp_path]), 0, 1, fault=Fault.DEADLOCK)


def test_a_fresh_process_was_never_in_the_groups_before_it(tmp_path: Path) -> None:
    """Rank 3 has died, and was started again; the groups were made anew."""
    groups = {**GROUPS, "again": range(4)}
    found = [Rank(rank, groups) for rank in range(4)]
    for one in found[:3]:
        one.issue_many(2)
    for one in found:
        one.issue(group="again")
    for one in found[:3]:
        one.issue(group="again", done=False)
    assert_blames(judge(tmp_path, found), 3, fault=Fault.MISSING_RANKS)


def test_an_op_of_a_group_that_others_have_rebuilt_waits_for_nobody(
    tmp_path: Path,
) -> None:
    """The error of the abort has ended rank 1, which has not rebuilt the group."""
    rebuilt = "rows (generation 1)"
    found = [Rank(rank, {"rows": range(3), rebuilt: range(3)}) for rank in range(3)]
    for one in found:
        one.issue(group="rows")
        if one.rank:
            one.issue(group="rows", line=13, done=False)
        if one.rank != 1:
            one.issue(group=rebuilt, line=11, done=False)
    text = "DistAbortedError: all_reduce #2: the group was aborted (by rank 0); rebuild"
    ended = {"text": text, "frames": [["/job/train.py", 13, "main"]]}
    facts = {FORM: 1, "rank": 1, "has_ended": True, "exception": ended}
    (tmp_path / "facts_rank_1.json").write_text(json.dumps(facts))
    report = judge(tmp_path, found)
    assert_blames(report, 1, fault=Fault.MISSING_RANKS)
    said = (
        "it ended with DistAbortedError: all_reduce #2: the group was aborted (by ran"
    )
    assert said in report.verdicts[0].text
