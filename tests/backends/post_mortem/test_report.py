"""What is read of dumps that are damaged, incomplete, old or of other forms."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.observe.verdicts import Fault
from rankscope.backends.post_mortem.report import Report, examine
from tests.backends.post_mortem.dumps import START_NS, Rank, write

WORLD = {"default_pg": range(4)}
SECOND = 10**9


def ranks(groups: Any = WORLD, count: int = 4, **how: Any) -> list[Rank]:
    return [
        Rank(
            rank,
            {name: own for name, own in _own(groups, rank).items()},
            **how,
        )
        for rank in range(count)
    ]


def _own(groups: Any, rank: int) -> dict[str, Any]:
    """Return the groups of `rank`: of several of one name the one that it is in."""
    found = {}
    for name, members in groups.items():
        several = members if isinstance(members[0], list) else [members]
        found[name] = next(one for one in several if rank in one)
    return found


def without_rank_2() -> list[Rank]:
    """Rank 2 misses the last of six ops."""
    found = ranks()
    for one in found:
        one.issue_many(5)
        if one.rank != 2:
            one.issue(done=False, line=31)
    return found


def problems(report: Report) -> dict[str, str]:
    return {Path(one.path).name: one.problem for one in report.files if one.problem}


def assert_blames(report: Report, *culprits: int, fault: Fault) -> None:
    assert [(one.fault, one.culprits) for one in report.verdicts] == [(fault, culprits)]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("active_only", [False, True])
def test_a_missing_rank(tmp_path: Path, as_json: bool, active_only: bool) -> None:
    folder = write(tmp_path, without_rank_2(), as_json=as_json, active_only=active_only)
    report = examine([folder])
    assert_blames(report, 2, fault=Fault.MISSING_RANKS)
    assert (report.verdicts[0].seq, report.verdicts[0].line) == (6, "train.py:31")
    assert report.world_size == 4
    assert [one.ranks for one in report.files] == [(0,), (1,), (2,), (3,)]


def test_the_ops_of_a_helper_are_told_with_the_callers_that_differ(
    tmp_path: Path,
) -> None:
    """All at one line of a helper, which another helper of one line calls."""
    found = ranks()
    for one in found:
        one.issue(line=7, called=[12, 19])
        if one.rank in (1, 2):
            called = [12, 23 + one.rank]
            one.issue("recv", line=7, done=False, peer=3 - one.rank, called=called)
    (verdict,) = examine([write(tmp_path, found)]).verdicts
    assert "recv #1 from rank 2 (train.py:7, called at train.py:24)" in str(verdict)
    assert "recv #1 from rank 1 (train.py:7, called at train.py:25)" in str(verdict)
    assert verdict.line == "train.py:7"


def test_over_gloo_what_is_retired_has_not_completed(tmp_path: Path) -> None:
    found = ranks(library="gloo")
    for one in found:
        one.issue_many(3)
        if one.rank != 2:
            # It has failed at its timeout on rank 0, and looks retired there.
            one.issue(done=one.rank == 0)
    report = examine([write(tmp_path, found)])
    assert_blames(report, 2, fault=Fault.MISSING_RANKS)


def test_gloo_names_no_ranks_of_several_groups(tmp_path: Path) -> None:
    """Who has no op in a group may be a member of it: nobody has to be missing."""
    found = ranks({"default_pg": range(4), "tp": [[0, 1], [2, 3]]}, library="gloo")
    for one in found:
        one.issue_many(2)
        if one.rank == 3:
            one.issue(group="tp", done=False)
    write(tmp_path, found)
    for one in found:
        content = one.dump()
        content["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
        path = tmp_path / f"nccl_trace_rank_{one.rank}"
        path.write_bytes(pickle.dumps(content, 2))
    report = examine([tmp_path])
    assert [(one.fault, one.culprits) for one in report.verdicts] == [
        (Fault.UNDECIDED, ())
    ]


def _nested() -> bytes:
    """Return a dump whose sizes are lists within lists, deeper than Python goes."""
    one = Rank(3, {"default_pg": range(4)})
    one.issue()["input_sizes"] = "here"
    data = pickle.dumps(one.dump(), 0)
    begin, end = data.split(b"Vhere\n")
    return begin + b"]" * 100_000 + b"a" * 99_999 + end


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (_nested(), "damaged"),
        (b"", "empty"),
        (pickle.dumps({"entries": []})[:-3], "damaged"),
        (pickle.dumps(["no", "dump"]), "no dump"),
        (pickle.dumps({"entries": [3], "pg_config": {}}), "damaged: entry 0"),
        (pickle.dumps({"entries": [{}], "pg_config": {}}), "damaged: entry 0"),
        (pickle.dumps({"entries": [{"record_id": "x"}]}), "record_id"),
        (
            pickle.dumps({"entries": [], "pg_config": {"0": {"ranks": "exit()"}}}),
            "ranks",
        ),
        (pickle.dumps(Path("x")), "refused"),
        (b'{"entries": [', "damaged"),
        (b"just text", "nothing that is known"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_the_others_are_judged(
    tmp_path: Path, data: bytes, problem: str
) -> None:
    write(tmp_path, without_rank_2())
    (tmp_path / "nccl_trace_rank_3").write_bytes(data)
    report = examine([tmp_path])
    found = problems(report)
    assert list(found) == ["nccl_trace_rank_3"]
    assert problem in found["nccl_trace_rank_3"]
    assert_blames(report, 2, fault=Fault.MISSING_RANKS)


def test_a_rank_without_a_file_is_named_only_where_all_others_are_in(
    tmp_path: Path,
) -> None:
    all_in = write(tmp_path / "in", [one for one in without_rank_2() if one.rank != 2])
    assert_blames(examine([all_in]), 2, fault=Fault.MISSING_RANKS)
    lost = write(tmp_path / "lost", [one for one in without_rank_2() if one.rank != 0])
    assert_blames(examine([lost]), 2, fault=Fault.MISSING_RANKS)
    # Several files are somewhere else: nothing is certain.
    for rank in 0, 1:
        there = [one for one in without_rank_2() if one.rank in (0, rank)]
        few = write(tmp_path / f"few_{rank}", there)
        assert_blames(examine([few]), fault=Fault.UNDECIDED)


@pytest.mark.parametrize("form", ["python", "torch", "json"])
def test_a_rank_that_died_while_it_wrote_is_named_and_one_with_a_damaged_file_is_not(
    tmp_path: Path, form: str
) -> None:
    folder = write(tmp_path, without_rank_2(), as_json=form == "json")
    (file,) = (one for one in folder.iterdir() if "2" in one.name)
    data = file.read_bytes()
    if form == "torch":
        # Its pickles end with a number for what they hold.
        data = data[:-1] + b"q=."
    file.write_bytes(data[: len(data) // 2])
    assert_blames(examine([folder]), 2, fault=Fault.MISSING_RANKS)
    middle = len(data) // 2
    file.write_bytes(data[:middle] + b"\xff" * 64 + data[middle + 64 :])
    report = examine([folder])
    assert_blames(report, fault=Fault.UNDECIDED)
    assert list(problems(report)) == [file.name]


@pytest.mark.parametrize(
    "name",
    [
        "nccl_trace_rank_node00_{}",
        "host7_{}",
        "rank{}_attempt3.pickle",
        "_dump_{}",
        "{}",
    ],
)
def test_the_rank_is_found_in_names_of_other_forms(tmp_path: Path, name: str) -> None:
    report = examine([write(tmp_path, without_rank_2(), name)])
    assert_blames(report, 2, fault=Fault.MISSING_RANKS)


def test_the_content_decides_which_rank_a_file_is_of(tmp_path: Path) -> None:
    """Sends tell the own rank; a name that says otherwise is reported."""
    found = ranks({"default_pg": range(2)}, 2)
    found[0].issue("send", peer=1)
    found[1].issue("recv", peer=0)
    for one in found:
        (tmp_path / f"rank_{1 - one.rank}").write_bytes(pickle.dumps(one.dump()))
    report = examine([tmp_path])
    assert sorted(one.ranks for one in report.files) == [(0,), (1,)]
    assert "its content is that of rank 1" in problems(report)["rank_0"]


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_attempts_the_newest_counts(tmp_path: Path, turned: bool) -> None:
    """Rank 2 of the newest attempt left no file: that of the older one is not its."""
    names = ["a", "b"][:: -1 if turned else 1]
    old = ranks()
    for one in old:
        one.issue_many(9)
    write(tmp_path / names[0], old)
    new = [one for one in without_rank_2() if one.rank != 2]
    for one in new:
        for entry in one.entries:
            entry["time_created_ns"] += 3_600_000_000_000
    write(tmp_path / names[1], new)
    report = examine([tmp_path])
    assert_blames(report, 2, fault=Fault.MISSING_RANKS)
    assert len([one for one in report.files if one.problem]) == 4
    assert "older attempt" in "".join(one.problem for one in report.files)
    # A dump that lists no op has no time: it is as old as those of its folder.
    new = without_rank_2()
    for entry in (entry for one in new for entry in one.entries):
        entry["time_created_ns"] += 3_600_000_000_000
    write(tmp_path / names[1], new, active_only=True)
    report = examine([tmp_path])
    assert_blames(report, 2, fault=Fault.MISSING_RANKS)
    used = [one.path for one in report.files if not one.problem]
    assert {os.path.dirname(path) for path in used} == {str(tmp_path / names[1])}


def test_clocks_of_hosts_that_differ_change_nothing(tmp_path: Path) -> None:
    found = without_rank_2()
    for entry in found[3].entries:
        entry["time_created_ns"] -= 7_200_000_000_000
    assert_blames(examine([write(tmp_path, found)]), 2, fault=Fault.MISSING_RANKS)


def test_two_groups_of_one_split_share_their_name(tmp_path: Path) -> None:
    found = ranks({"default_pg": range(4), "half": [[0, 2], [1, 3]]})
    for one in found:
        one.issue_many(2, group="half")
        if one.rank != 3:
            one.issue(group="half", done=one.rank != 1)
    report = examine([write(tmp_path, found)])
    assert_blames(report, 3, fault=Fault.MISSING_RANKS)
    assert report.verdicts[0].group.ranks == (1, 3)


def test_a_dump_that_is_older_than_the_others_is_no_hang(tmp_path: Path) -> None:
    """A healthy job, dumped rank by rank: others have come further since."""
    found = ranks()
    for one in found:
        one.issue_many(5 + 3 * one.rank)
        one.issue(done=False)
    report = examine([write(tmp_path, [found[0], *found[2:]])])
    assert [one for one in report.verdicts if one.culprits] == []


def test_an_op_that_began_just_before_the_dump_is_no_hang(tmp_path: Path) -> None:
    write(tmp_path, without_rank_2())
    created = 1_790_000_000_005_000_000
    for path in tmp_path.iterdir():
        os.utime(path, ns=(created + 900_000_000, created + 900_000_000))
    assert examine([tmp_path]).verdicts == ()


def test_a_start_that_torch_sees_as_it_dumps_makes_no_op_young(tmp_path: Path) -> None:
    found = without_rank_2()
    dumped = START_NS + 600 * SECOND
    for one in found:
        for entry in one.entries[5:]:
            entry["time_discovered_started_ns"] = dumped
    folder = write(tmp_path, found)
    for path in tmp_path.iterdir():
        os.utime(path, ns=(dumped + SECOND, dumped + SECOND))
    assert_blames(examine([folder]), 2, fault=Fault.MISSING_RANKS)


def test_an_end_that_torch_sees_as_it_dumps_tells_when_that_was(tmp_path: Path) -> None:
    """The files are copies, whose times tell nothing."""
    found = without_rank_2()
    for one in found:
        one.entries[4]["retired"] = False
    assert examine([write(tmp_path, found)]).verdicts == ()


def test_one_rank_that_was_at_work_tells_that_the_others_may_be(tmp_path: Path) -> None:
    """Of the others no time tells for how long they wait."""
    found = without_rank_2()
    found[0].entries[4]["retired"] = False
    (verdict,) = examine([write(tmp_path, found)]).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())


def test_dumps_of_different_moments_with_an_idle_rank_are_no_hang(
    tmp_path: Path,
) -> None:
    """Rank 1 was read when it came to the last op, rank 2 before, the others after."""
    found = ranks()
    for one in found:
        one.issue_many(6 if one.rank != 2 else 4)
    found[1].entries[-1].update(
        state="started", retired=False, time_discovered_completed_ns=None
    )
    (verdict,) = examine([write(tmp_path, found)]).verdicts
    assert (verdict.fault, verdict.culprits) == (Fault.UNDECIDED, ())


def test_a_rank_of_gloo_in_a_later_op_of_the_group_is_not_awaited_in_the_first(
    tmp_path: Path,
) -> None:
    found = ranks(library="gloo")
    for one in found:
        one.issue_many(5 + 2 * one.rank)
        one.issue(done=False)
    report = examine([write(tmp_path, found)])
    assert [one for one in report.verdicts if one.culprits] == []


def test_records_that_were_reset_are_not_all_that_there_were(tmp_path: Path) -> None:
    """As torchft does: the numbers of records begin anew, those of ops go on."""
    found = ranks({"default_pg": (0, 1)}, 2)
    for one in found:
        for _ in range(6):
            op = "recv" if one.rank else "send"
            one.issue(op, peer=1 - one.rank)
    found[1].issue("recv", peer=0, done=False)
    del found[0].entries[:4]
    for number, entry in enumerate(found[0].entries):
        entry["record_id"] = number
    assert_blames(examine([write(tmp_path, found)]), 0, fault=Fault.MISSING_RANKS)


def test_the_number_of_dumps_is_not_the_size_of_the_world(tmp_path: Path) -> None:
    """Gloo names the ranks of no group where there are several; rank 3 left no dump."""
    folder = tmp_path
    for one in ranks({"default_pg": range(4), "tp": [[0, 1], [2, 3]]}, library="gloo"):
        one.issue(group="tp")
        one.issue(done=False)
        content = one.dump()
        content["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
        if one.rank < 3:
            path = folder / f"nccl_trace_rank_{one.rank}"
            path.write_bytes(pickle.dumps(content, 2))
    assert [one for one in examine([folder]).verdicts if one.culprits] == []


@pytest.mark.parametrize(
    ("timeout_ms", "hangs"), [(600_000, False), (10_000, True)], ids=["slow", "late"]
)
def test_an_op_issued_long_before_is_no_hang_while_others_end(
    timeout_ms: int, hangs: bool, tmp_path: Path
) -> None:
    found = without_rank_2()
    dumped = START_NS + 20 * SECOND
    for one in found:
        one.entries[4]["time_discovered_completed_ns"] = dumped - SECOND
        for entry in one.entries:
            entry["timeout_ms"] = timeout_ms
    folder = write(tmp_path, found)
    for path in tmp_path.iterdir():
        os.utime(path, ns=(dumped, dumped))
    assert bool(examine([folder]).verdicts) is hangs


def test_counters_that_lag_in_a_job_that_runs_are_no_hang(tmp_path: Path) -> None:
    """The watchdog has not seen yet that the ops have ended which are left out."""
    for one in without_rank_2():
        content = one.dump(active_only=True)
        content["pg_status"]["0"]["last_completed_collective"] = 2
        path = tmp_path / f"nccl_trace_rank_{one.rank}"
        path.write_bytes(pickle.dumps(content, 2))
        os.utime(path, ns=(START_NS + SECOND, START_NS + SECOND))
    assert examine([tmp_path]).verdicts == ()


def as_torchcomms(one: Rank, active_only: bool = False) -> dict[str, Any]:
    """Return a dump as torchcomms writes it: one number for all groups, no status."""
    content = one.dump(active_only)
    content["pg_status"] = {}
    for name in content["pg_config"]:
        content["pg_config"][name]["desc"] = "ncclx"
    for entry in content["entries"]:
        entry["process_group"] = (entry["process_group"][0], "ncclx")
        op = entry["profiling_name"].partition(":")[2].partition(" ")[0]
        entry.update(
            collective_seq_id=entry["record_id"],
            p2p_seq_id=0,
            is_p2p=False,
            profiling_name=f"ncclx:{op}",
            # Its end is seen where it retires, too late for its state.
            state="started",
            time_discovered_completed_ns=None,
        )
    return content


@pytest.mark.parametrize("active_only", [False, True])
def test_the_numbers_of_torchcomms_count_over_all_groups(
    tmp_path: Path, active_only: bool
) -> None:
    found = ranks({"default_pg": range(4), "tp": [[0, 1], [2, 3]]})
    for one in found:
        one.issue_many(1 + one.rank, op="send", peer=(one.rank + 1) % 4)
        one.issue_many(3, group="tp")
        if one.rank != 2:
            one.issue(done=False)
        path = tmp_path / f"comm_lib_trace_rank_{one.rank}"
        path.write_bytes(pickle.dumps(as_torchcomms(one, active_only), 2))
    report = examine([tmp_path])
    if active_only:
        assert report.verdicts == ()
        assert len(problems(report)) == 4
        assert "count over all groups" in problems(report)["comm_lib_trace_rank_0"]
        return
    assert_blames(report, 2, fault=Fault.MISSING_RANKS)
    assert report.verdicts[0].group.name == "0"


def batch(one: Rank, *parts: tuple[str, int], done: bool = True) -> None:
    """Record a batch: its parts stay scheduled, and its own entry has the state."""
    first = len(one.entries)
    number = max((entry["p2p_seq_id"] for entry in one.entries), default=0) + 1
    for op, peer in parts:
        entry = one.issue(op, peer=peer, done=False)
        entry.update(state="scheduled", time_discovered_started_ns=None)
    one.issue("coalesced", done=done)
    for place, entry in enumerate(one.entries[first:]):
        entry.update(collective_seq_id=0, p2p_seq_id=number, op_id=first + place + 1)
        entry["is_p2p"] = True


@pytest.mark.parametrize("active_only", [False, True])
def test_the_sends_of_a_batch_that_is_over_are_over(
    tmp_path: Path, active_only: bool
) -> None:
    found = ranks()
    for one in found:
        for _ in range(3):
            after, before = (one.rank + 1) % 4, (one.rank - 1) % 4
            batch(one, ("send", after), ("recv", before))
    folder = write(tmp_path, found, active_only=active_only)
    assert examine([folder]).verdicts == ()


def of_pairs() -> list[Rank]:
    """Two groups of two; rank 1 waits for rank 0, whose records are not kept."""
    groups = {"default_pg": range(4), "left": (0, 1), "right": (2, 3), "odd": (0, 2)}
    found = [
        Rank(rank, {name: all_of for name, all_of in groups.items() if rank in all_of})
        for rank in range(4)
    ]
    for one in found:
        one.issue_many(3)
    found[1].issue(group="left", done=False)
    found[3].issue(done=False)
    return found[1:]


def test_a_rank_without_records_may_wait_for_one_that_is_in_no_op(
    tmp_path: Path,
) -> None:
    found = of_pairs()
    found[1].issue(group="odd", done=False)
    assert_blames(examine([write(tmp_path / "a", found)]), 0, fault=Fault.MISSING_RANKS)
    for one in found[1:]:
        one.entries.pop()
    assert_blames(examine([write(tmp_path / "b", found)]), fault=Fault.UNDECIDED)


def test_a_rank_without_records_is_not_named_beside_an_op_that_hangs(
    tmp_path: Path,
) -> None:
    found = of_pairs()
    found[2].entries.pop()
    for one in found[1:]:
        one.issue(group="right", done=False)
    report = examine([write(tmp_path, found)])
    assert_blames(report, 2, 3, fault=Fault.EXECUTION_HANG)


def test_batches_of_one_op_that_are_over(tmp_path: Path) -> None:
    """In a dump of what is active, each looks like a send or receive that hangs."""
    found = ranks()
    for one in found:
        for _ in range(3):
            batch(one, ("recv" if one.rank % 2 else "send", one.rank ^ 1))
        if one.rank != 2:
            one.issue(done=False)
    report = examine([write(tmp_path, found, active_only=True)])
    assert_blames(report, 2, fault=Fault.MISSING_RANKS)
    for one in found:
        content = one.dump(active_only=True)
        content["pg_status"] = {}
        (tmp_path / f"nccl_trace_rank_{one.rank}").write_bytes(pickle.dumps(content))
    # Rank 2 may be in its last one: without counters, nothing tells.
    assert_blames(examine([tmp_path]), fault=Fault.UNDECIDED)


@pytest.mark.parametrize("lost", [0, 4])
def test_a_batch_in_flight_of_which_a_part_is_over(tmp_path: Path, lost: int) -> None:
    """Rank 0 is in its third batch, 1 and 3 are in their second, 2 has not started."""
    found = ranks()
    for one in found:
        after, before = (one.rank + 1) % 4, (one.rank - 1) % 4
        parts = ("send", after), ("recv", before), ("send", before), ("recv", after)
        for number in range(3):
            batch(one, *parts, done=number < (2 if one.rank == 0 else 1))
        for entry in one.entries:
            entry["state"] = "completed" if entry["retired"] else "scheduled"
        # The numbers of what the ring has lost are not those of any other rank.
        del one.entries[: lost + one.rank if lost else 0]
    report = examine([write(tmp_path, found, active_only=True)])
    if lost:
        assert_blames(report, fault=Fault.UNDECIDED)
    else:
        culprits = {rank for one in report.verdicts for rank in one.culprits}
        assert culprits == {1, 2, 3}


def test_a_ring_that_lacks_older_entries(tmp_path: Path) -> None:
    found = without_rank_2()
    for one in found:
        del one.entries[:3]
    assert_blames(examine([write(tmp_path, found)]), 2, fault=Fault.MISSING_RANKS)


@pytest.mark.parametrize("active_only", [False, True])
def test_a_ring_that_lacks_what_is_in_flight(tmp_path: Path, active_only: bool) -> None:
    """All ranks are in the ops that are left: the one that hangs is an earlier one."""
    found = ranks()
    for one in found:
        one.issue_many(2)
        one.issue_many(3, done=False)
        content = one.dump(active_only)
        content["entries"] = content["entries"][-2:]
        path = tmp_path / f"nccl_trace_rank_{one.rank}"
        path.write_bytes(pickle.dumps(content, 2))
    assert_blames(examine([tmp_path]), fault=Fault.UNDECIDED)


def test_counters_that_lag_name_nobody(tmp_path: Path) -> None:
    """Rank 2's has not seen #3 end, which is not listed: it is over, or lost."""
    found = ranks()
    for one in found:
        one.issue_many(3)
        one.issue(done=False)
        content = one.dump(active_only=True)
        if one.rank == 2:
            content["pg_status"]["0"]["last_completed_collective"] = 2
        path = tmp_path / f"nccl_trace_rank_{one.rank}"
        path.write_bytes(pickle.dumps(content, 2))
        os.utime(path, (0, 0))
    assert_blames(examine([tmp_path]), fault=Fault.UNDECIDED)


def test_dumps_without_an_op_do_not_say_that_nothing_hangs(tmp_path: Path) -> None:
    text = examine([write(tmp_path, ranks())]).as_text()
    assert text.startswith("the dumps list no op: none was in flight")
    assert text.endswith("read: ranks 0–3 of 4")


def test_archives_have_members_that_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "d", without_rank_2())
    archive = tmp_path / "dumps.zip"
    with zipfile.ZipFile(archive, "w") as pack:
        for path in (tmp_path / "d").iterdir():
            pack.write(path, f"../../{path.name}")
    report = examine([archive])
    assert_blames(report, 2, fault=Fault.MISSING_RANKS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "dumps.zip"]


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04" + bytes(64))
    (tmp_path / "x.tar.gz").write_bytes(b"\x1f\x8b" + bytes(64))
    report = examine([tmp_path])
    assert len(problems(report)) == 2
    assert report.verdicts == ()


def test_the_json_has_the_documented_keys(tmp_path: Path) -> None:
    found = json.loads(examine([write(tmp_path, without_rank_2())]).as_json())
    assert list(found) == ["version", "verdicts", "files", "world_size", "late"]
    assert found["version"] == 1
    assert list(found["verdicts"][0]) == [
        *("kind", "culprits", "group", "op", "sequence_number", "line", "text"),
        "consequences",
    ]
    assert list(found["files"][0]) == ["path", "kind", "ranks", "problem"]


def test_a_send_of_gloo_is_in_flight_until_somebody_waits_for_it(
    tmp_path: Path,
) -> None:
    ranks = [Rank(one, {"default_pg": (0, 1)}) for one in range(2)]
    ranks[0].issue("send", peer=1, line=8, done=False)
    ranks[0].issue("recv", peer=1, line=9, done=False)
    ranks[1].issue("recv", peer=0, line=12)
    for one in ranks:
        for entry in one.entries:
            # As our watch of torch's gloo records it.
            name = entry["profiling_name"].replace("nccl:", "gloo:")
            entry.update(profiling_name=name, backend="gloo")
    (verdict,) = examine([write(tmp_path, ranks)]).verdicts
    assert verdict.culprits == (1,)
    assert "rank 0 waits in recv #2 from rank 1 (train.py:9)" in str(verdict)
