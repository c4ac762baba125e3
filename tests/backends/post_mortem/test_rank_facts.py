"""Facts that a rank has written, and who is missing where ranks make a group."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.observe.evidence import IssuedOp
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.backends.post_mortem.rank_facts import FORM
from rankscope.backends.post_mortem.report import Report, examine
from tests.backends.post_mortem.dumps import Rank, write


def facts(rank: int, **more: Any) -> dict[str, Any]:
    return {FORM: 1, "rank": rank, "world_size": 4, "has_ended": False, **more}


WAITS = {
    "call": "init_process_group",
    "address": "node1:29500",
    "line": ["/job/train.py", 12, "main"],
}


def report_of(folder: Path, *found: dict[str, Any]) -> Report:
    for one in found:
        path = folder / f"facts_rank_{one['rank']}.json"
        path.write_text(json.dumps(one, indent=1))
    return examine([folder])


def test_who_is_missing_at_the_meeting(tmp_path: Path) -> None:
    report = report_of(
        tmp_path,
        facts(0, rendezvous=WAITS),
        facts(1, rendezvous=WAITS),
        facts(2, death="rank 2 is dead: its process has ended"),
        facts(
            3,
            exception={
                "text": "OSError: disk full",
                "frames": [["/job/data.py", 7, "read"], ["/job/train.py", 3, "main"]],
            },
            has_ended=True,
        ),
    )
    (verdict,) = report.verdicts
    assert verdict.fault is Fault.MISSING_RANKS
    assert verdict.culprits == (2, 3)
    assert verdict.waiting == (0, 1)
    assert (verdict.op, verdict.line) == ("init_process_group", "train.py:12")
    for said in ("node1:29500", "rank 2 is dead", "OSError: disk full at data.py:7"):
        assert said in str(verdict)


@pytest.mark.parametrize("given", [4, 5])
def test_a_world_size_that_no_launcher_has_started(tmp_path: Path, given: int) -> None:
    """Each has the size that the program gives; `WORLD_SIZE` is that of the job."""
    waits = WAITS | {"world_size": given}
    (verdict,) = report_of(
        tmp_path, *(facts(rank, rendezvous=waits) for rank in range(4))
    ).verdicts
    is_wrong = given == 5
    assert verdict.fault is (Fault.SIZE_MISMATCH if is_wrong else Fault.UNDECIDED)
    assert verdict.text.startswith(f"ranks 0–3 of {given} wait in init_process_group")
    said = "; the launcher has started 4 ranks, not 5"
    assert verdict.text.endswith(said) is is_wrong


def test_a_rank_that_an_interrupt_has_ended(tmp_path: Path) -> None:
    """It has left: nobody knows whether the signal was for it alone."""
    where = [["/job/train.py", 7, "main"]]
    raised = {"text": "KeyboardInterrupt", "frames": where}
    ranks = [Rank(rank, {"default_pg": range(4)}) for rank in range(4)]
    for one in ranks:
        one.issue_many(2)
    for one in ranks[1:]:
        one.issue(line=31, done=False)
    write(tmp_path, ranks)
    for ended, said in (True, "it has left the program at"), (False, "it handles"):
        found = facts(0, exception=raised, has_ended=ended)
        (verdict,) = report_of(tmp_path, found, *map(facts, range(1, 4))).verdicts
        assert verdict.culprits == (0,)
        assert (said in verdict.text) is ended
        assert ("train.py:7 (KeyboardInterrupt)" in verdict.text) is ended


@pytest.mark.parametrize("final", [True, False])
def test_a_rank_that_came_when_the_report_was_written(
    tmp_path: Path, final: bool
) -> None:
    ranks = [Rank(rank, {"default_pg": range(4)}) for rank in range(4)]
    for one in ranks:
        one.issue(line=31, done=False)
    write(tmp_path, ranks)
    (begun,) = (one.created_ns or 0 for one in ops_of(tmp_path, 3))
    ages = [10, 10, 10, 0.5]
    found = [
        facts(rank, written_ns=begun + int(age * 1e9), final=final)
        for rank, age in enumerate(ages)
    ]
    (verdict,) = report_of(tmp_path, *found).verdicts
    if final:
        assert verdict.fault is Fault.EXECUTION_HANG
        return
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    said = "rank 3 came to all_reduce #1 (train.py:31) only when this report was"
    assert verdict.text.startswith(said)


def ops_of(folder: Path, rank: int) -> list[IssuedOp]:
    groups = examine([folder]).evidence.ranks[rank].groups.values()
    return [op for found in groups for op in found.ops]


def test_a_rank_that_has_ended_its_groups(tmp_path: Path) -> None:
    ranks = [Rank(rank, {"default_pg": range(4)}) for rank in range(3)]
    for one in ranks:
        one.issue(line=31, done=False)
    write(tmp_path, ranks)
    stack = 'Stack (most recent call first):\n  File "/job/train.py", line 17 in main\n'
    (tmp_path / "stacks_rank_3.txt").write_text(stack)
    gone = facts(3, groups_ended_at="train.py:16")
    (verdict,) = report_of(tmp_path, *map(facts, range(3)), gone).verdicts
    assert verdict.culprits == (3,)
    said = "it is at train.py:17, after destroy_process_group() at train.py:16"
    assert said in verdict.text
    (tmp_path / "stacks_rank_3.txt").unlink()
    assert "it has called destroy_process_group() at train.py:16" in (
        examine([tmp_path]).verdicts[0].text
    )


def test_a_rank_that_fails_while_others_join(tmp_path: Path) -> None:
    """It was through the meeting, and has records."""
    write(tmp_path, [Rank(0, {"default_pg": range(4)})])
    raised = {"text": "ValueError: no gloo", "frames": [["/job/train.py", 13, "main"]]}
    first = facts(0, has_ended=True, exception=raised)
    others = [facts(rank, rendezvous=WAITS) for rank in (1, 2, 3)]
    (verdict,) = report_of(tmp_path, first, *others).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (0,))
    assert verdict.text.endswith("rank 0 ended with ValueError: no gloo at train.py:13")


def test_ranks_that_meet_at_other_ports(tmp_path: Path) -> None:
    """Also where the others have met: some backends make a group without waiting."""

    def found(*ports: str, waiting: int = 4) -> Verdict:
        each = [
            facts(rank, environment={"MASTER_PORT": port}, written_ns=rank)
            for rank, port in enumerate(ports)
        ]
        for one in each[-waiting:]:
            address = f"node1:{one['environment']['MASTER_PORT']}"
            one["rendezvous"] = {**WAITS, "address": address}
        (verdict,) = report_of(tmp_path, *each).verdicts
        return verdict

    verdict = found("29500", "29500", "29500", "1", waiting=1)
    assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (3,))
    said = "MASTER_PORT differs between ranks that meet: 1 on rank 3, 29500 on"
    assert verdict.text == f"{said} ranks 0–2"
    assert found("1", "1", "2", "2").culprits == ()
    assert "differs" not in found("1", "1", "1", "1").text
    # The reports of two jobs.
    each = [
        facts(rank, environment={"MASTER_PORT": str(rank)}, written_ns=rank * 10**11)
        | {"rendezvous": {**WAITS, "address": f"node1:{rank}"}}
        for rank in range(4)
    ]
    (verdict,) = report_of(tmp_path, *each).verdicts
    assert "differs" not in verdict.text


def test_a_rank_that_has_ended_its_groups_meets_nobody_at_another_port(
    tmp_path: Path,
) -> None:
    """The others make their group anew without it."""
    again = {
        "environment": {"MASTER_PORT": "2", "WORLD_SIZE": "3"},
        "rendezvous": {**WAITS, "address": "node1:2"},
        "world_size": 3,
    }
    left = facts(
        2,
        environment={"MASTER_PORT": "1", "WORLD_SIZE": "4"},
        groups_ended_at="train.py:16",
        has_left=True,
        left_at="train.py:18",
    )
    for port in "2", "1":
        left["environment"]["MASTER_PORT"] = port
        others = [facts(rank) | again for rank in (0, 1)]
        (verdict,) = report_of(tmp_path, *others, left).verdicts
        assert (verdict.fault, verdict.culprits) == (Fault.MISSING_RANKS, (2,))
        assert "ranks 0–1 of 3 wait in init_process_group" in verdict.text
        assert "rank 2 has left the program at train.py:18" in verdict.text


def test_a_rank_without_facts_is_not_blamed(tmp_path: Path) -> None:
    """It may be on another host, and wait there."""
    report = report_of(tmp_path, facts(0, rendezvous=WAITS), facts(1, rendezvous=WAITS))
    (verdict,) = report.verdicts
    assert verdict.fault is Fault.UNDECIDED
    assert verdict.culprits == ()
    assert "ranks 2–3" in str(verdict)


@pytest.mark.parametrize(
    ("sizes", "culprits", "said"),
    [
        ([3, 4, 3], (1,), "4 on rank 1, 3 on ranks 0, 2"),
        ([2, 3], (), "2 on rank 0, 3 on rank 1"),
        ([3, 3, 3], None, ""),
    ],
)
def test_ranks_with_other_world_sizes(
    tmp_path: Path, sizes: list[int], culprits: tuple[int, ...] | None, said: str
) -> None:
    def started(rank: int, port: str, size: int) -> dict[str, Any]:
        env = {"WORLD_SIZE": str(size), "MASTER_PORT": port}
        own = facts(rank, rendezvous=WAITS, environment=env)
        return {**own, "world_size": size}

    found = [started(rank, "1", size) for rank, size in enumerate(sizes)]
    (verdict,) = report_of(tmp_path, *found).verdicts
    if culprits is None:
        assert verdict.fault is Fault.UNDECIDED
        return
    assert (verdict.fault, verdict.culprits) == (Fault.SIZE_MISMATCH, culprits)
    assert verdict.text == f"WORLD_SIZE differs between ranks that meet: {said}"
    # Of two starts, or where groups were shrunk since, it is no cause.
    found[0]["environment"]["MASTER_PORT"] = "2"
    (verdict,) = report_of(tmp_path, *found).verdicts
    assert verdict.fault is Fault.UNDECIDED
    found = [{**started(rank, "1", 9), "world_size": n} for rank, n in enumerate(sizes)]
    (verdict,) = report_of(tmp_path, *found).verdicts
    assert verdict.fault is Fault.UNDECIDED


def test_a_rank_that_runs_and_cannot_be_read_may_wait_too(tmp_path: Path) -> None:
    found = facts(1, pid=4711, host="node1", unseen="py-spy is missing")
    (verdict,) = report_of(tmp_path, facts(0, rendezvous=WAITS), found).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    said = "rank 1 runs (pid 4711 on node1), and where is not known: py-spy is missing"
    assert said in str(verdict)


def test_the_death_of_a_rank_has_its_line_if_its_own_host_was_read(
    tmp_path: Path,
) -> None:
    raised = {"text": "OSError: full", "frames": [["/job/data.py", 7, "read"]]}
    ended = "rank 1 ended with OSError: full"
    for host, found in (
        ("a", {"death": ended}),
        ("b", {"exception": raised, "has_ended": True}),
        ("c", {"death": ended}),
    ):
        (tmp_path / host).mkdir()
        report_of(tmp_path / host, facts(1, **found))
    assert examine([tmp_path]).evidence.ranks[1].death == f"{ended} at data.py:7"


def test_reports_of_two_hosts_are_joined(tmp_path: Path) -> None:
    for host, ranks in (("a", (0, 1)), ("b", (2, 3))):
        folder = tmp_path / host
        folder.mkdir()
        found = [
            facts(one, **({} if one == 3 else {"rendezvous": WAITS})) for one in ranks
        ]
        report_of(folder, *found)
    (verdict,) = examine([tmp_path / "a", tmp_path / "b"]).verdicts
    assert verdict.culprits == (3,)


def test_who_is_on_a_host_that_was_not_read_is_not_blamed(tmp_path: Path) -> None:
    ranks = [Rank(rank, {"default_pg": range(4)}) for rank in range(3)]
    for one in ranks:
        one.issue_many(2)
        one.issue(line=31, done=False)
    write(tmp_path, ranks)
    (verdict,) = examine([tmp_path]).verdicts
    assert verdict.culprits == (3,)
    (verdict,) = report_of(tmp_path, *map(facts, range(3))).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())
    assert "nothing is known of rank 3" in str(verdict)
    # Its host was read, and it could not write: its GIL is held.
    (verdict,) = report_of(tmp_path, *map(facts, range(4))).verdicts
    assert verdict.culprits == (3,)
    stopped = facts(3, pid=7, host="a", silence="has not answered: it is stopped")
    (verdict,) = report_of(tmp_path, *map(facts, range(3)), stopped).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.RANK_NOT_RESPONDING, (3,))
    said = "rank 3 (pid 7 on a) has not answered: it is stopped; ranks 0–2 wait in all"
    assert str(verdict).startswith(said)


LOST = (
    "DistAbortedError: all_reduce #3 of group 'default': the group was aborted: the "
    "connection to the store at node1:29500 was lost: the process of rank 0 ended, or "
    "the network failed"
)
LEFT = "DistAbortedError: rank 0 left group 'rows': its process, which serves the store"


@pytest.mark.parametrize("said", [LOST, f"{LEFT}, ends; shrink_group() makes a group"])
def test_an_op_that_the_end_of_the_store_cut_off_does_not_hang(
    tmp_path: Path, said: str
) -> None:
    ranks = [Rank(rank, {"rows": (1, 2, 3)}) for rank in (1, 2, 3)]
    for one in ranks:
        one.issue(group="rows")
        one.issue(group="rows", line=31, done=False)
    write(tmp_path, ranks)
    lost = {"text": said, "frames": [["/job/train.py", 31, "main"]]}
    found = [facts(0, has_left=True, final=True)]
    found += [facts(rank, exception=lost, has_ended=True) for rank in (1, 2)]
    newest = max(entry["time_created_ns"] for one in ranks for entry in one.entries)

    def verdict(age: float) -> Verdict:
        for path in tmp_path.iterdir():
            os.utime(path, ns=(0, newest + int(age * 1e9)))
        (one,) = report_of(tmp_path, *found).verdicts
        return one

    young = verdict(0.1)
    assert (young.fault, young.culprits) == (Fault.MISSING_RANKS, (0,))
    assert young.waiting == (1, 2)
    assert str(young) == (
        "rank 0 has left the program, and with it the store, which ranks 1–2 still need"
    )
    assert verdict(3.0).fault is Fault.EXECUTION_HANG


@pytest.mark.parametrize("ended", [True, False])
def test_the_ranks_that_an_error_names_have_ended_who_raised_it(
    tmp_path: Path, ended: bool
) -> None:
    error = {
        "text": "DistAbortedError: rank 0 is gone",
        "frames": [["/job/train.py", 3, "main"]],
        "culprits": [0, "1", 3],
    }
    report = report_of(tmp_path, facts(2, exception=error, has_ended=ended))
    assert report.evidence.rank(2).ended_by == ((0, 3) if ended else None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f'{{"{FORM}": 1', "cannot be read"),
        (f'{{"{FORM}": 1, "rank": "0"}}', "of which rank"),
        (f'{{"{FORM}": 1, "rank": -1}}', "of which rank"),
    ],
)
def test_damaged_facts_are_a_problem_of_their_file(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "facts_rank_0.json").write_text(text)
    (file,) = examine([tmp_path]).files
    assert problem in file.problem


@pytest.mark.parametrize("value", [None, 1, "x", [], {}, [1, 2, 3], ["f", "1", "g"]])
def test_values_of_a_wrong_type_tell_nothing(tmp_path: Path, value: Any) -> None:
    keys = ("exception", "rendezvous", "death", "pid", "has_left", "final")
    report = report_of(tmp_path, facts(0, **dict.fromkeys(keys, value)))
    one = report.evidence.ranks[0]
    assert one.exception is None
    assert not one.has_left


def test_a_stack_that_tells_of_a_crash_is_no_log_that_is_cut(tmp_path: Path) -> None:
    stack = 'Stack (most recent call first):\n  File "/job/train.py", line 17 in main\n'
    text = f"Fatal Python error: Segmentation fault\n\n{stack}"
    (tmp_path / "stacks_rank_1.txt").write_text(text)
    report = report_of(tmp_path, facts(0), facts(1), facts(2))
    assert not any(one.problem for one in report.files)


def test_results_beside_the_evidence_are_no_problem(tmp_path: Path) -> None:
    report = report_of(tmp_path, facts(0))
    (tmp_path / "verdict.json").write_text(report.as_json())
    (tmp_path / "verdict.txt").write_text("Rankscope verdict\n\nrank 0: it hangs\n")
    files = examine([tmp_path]).files
    assert {one.kind for one in files} == {"report", "facts of a rank"}
    assert [one.problem for one in files] == ["", "", ""]
