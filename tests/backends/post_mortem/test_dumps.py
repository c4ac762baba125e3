"""Dumps as they are found: packed, damaged, of hosts, of two attempts, harmful."""

from __future__ import annotations

import bz2
import gzip
import html
import io
import json
import lzma
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.post_mortem import files as module
from rankscope.backends.post_mortem.flight_entry import read_entries
from rankscope.backends.post_mortem.report import Report, examine
from tests.backends.post_mortem.dumps import START_NS, Rank, write

WORLD = 4
#: The rank that never comes to its third all_reduce.
LATE = 2


def dump(rank: int, ops: int = 3) -> dict[str, Any]:
    """Return the dump of `rank`, whose last op of `ops` hangs, unless it is `LATE`."""
    one = Rank(rank, {"default_pg": range(WORLD)})
    one.issue_many(ops - 1, line=88)
    if rank != LATE:
        one.issue(done=False, line=88)
    return one.dump()


def pickled(ops: int = 3) -> dict[str, bytes]:
    return {
        f"nccl_trace_rank_{rank}": pickle.dumps(dump(rank, ops), 2)
        for rank in range(WORLD)
    }


def written(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def is_found(report: Report) -> None:
    (verdict,) = report.verdicts
    assert verdict.fault.value == "missing ranks"
    assert verdict.culprits == (LATE,)
    assert (verdict.op, verdict.seq) == ("all_reduce", 3)
    assert "train.py:88" in verdict.text
    assert report.world_size == WORLD


def of_a_folder(folder: Path) -> Path:
    return written(folder, pickled())


def of_folders_of_hosts(folder: Path) -> Path:
    for number, (name, data) in enumerate(pickled().items()):
        written(folder / f"node{number // 2}", {name: data})
    return folder


def of_json(folder: Path) -> Path:
    texts = {f"rank_{r}.json": json.dumps(dump(r)).encode() for r in range(WORLD)}
    return written(folder, texts)


def of_a_page(folder: Path) -> Path:
    """As `/fr_trace_json` of torch's debug server, saved by a browser."""
    page = "<!doctype html><body>" + "".join(
        f"<h2>Rank {rank}: http://node{rank}:25999</h2>\n"
        f"<pre>{html.escape(json.dumps(dump(rank)))}</pre>\n"
        for rank in range(WORLD)
    )
    return written(folder, {"page.html": page.encode()})


def of_a_tar(folder: Path) -> Path:
    path = folder / "dumps.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in pickled().items():
            member = tarfile.TarInfo(f"dumps/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def of_a_zip(folder: Path) -> Path:
    path = folder / "dumps.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in pickled().items():
            archive.writestr(f"../{name}", data)
    return path


def of_packed_files(folder: Path) -> Path:
    """Each file packed, by three programs; one in an archive."""
    pack: list[Callable[[bytes], bytes]]
    pack = [gzip.compress, bz2.compress, lzma.compress]
    suffixes = ["gz", "bz2", "xz"]
    files = {
        f"{name}.{suffixes[number % 3]}": pack[number % 3](data)
        for number, (name, data) in enumerate(pickled().items())
    }
    with tarfile.open(folder / "one.tar", "w") as archive:
        name, data = files.popitem()
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return written(folder, files)


def with_hosts_in_the_names(folder: Path) -> Path:
    return written(
        folder,
        {
            f"nccl_trace_rank_gpu-node{rank // 2:02d}_{rank}": data
            for rank, data in enumerate(pickled().values())
        },
    )


@pytest.mark.parametrize(
    "found",
    [
        of_a_folder,
        of_folders_of_hosts,
        of_json,
        of_a_page,
        of_a_tar,
        of_a_zip,
        of_packed_files,
        with_hosts_in_the_names,
    ],
)
def test_dumps_are_read_as_they_are_found(
    found: Callable[[Path], Path], tmp_path: Path
) -> None:
    report = examine([found(tmp_path)])
    is_found(report)
    assert [one.problem for one in report.files] == [""] * WORLD
    assert {rank for one in report.files for rank in one.ranks} == {*range(WORLD)}
    # An archive stays packed.
    names = {path.name for path in tmp_path.iterdir()}
    assert not names & {"dumps"}
    assert not (tmp_path.parent / "nccl_trace_rank_0").exists()


def test_a_packed_file_that_was_cut_is_named(tmp_path: Path) -> None:
    files = pickled()
    name, data = files.popitem()
    files[f"{name}.gz"] = gzip.compress(data)[:-20]
    files["noise.xz"] = b"\xfd7zXZ\x00" + bytes(range(200))
    report = examine([written(tmp_path, files)])
    problems = {Path(one.path).name: one.problem for one in report.files if one.problem}
    assert set(problems) == {f"{name}.gz", "noise.xz"}
    assert all("cannot be read: " in text for text in problems.values())


def test_a_packed_file_with_too_much_in_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST", 1 << 20)
    monkeypatch.setattr(module, "LARGEST_READ", 1 << 16)
    written(tmp_path, {"all.gz": gzip.compress(b"\0\1" * (4 << 20)), **pickled()})
    report = examine([tmp_path])
    (problem,) = [one.problem for one in report.files if one.problem]
    assert problem == "left out: more than 1 MiB, which is what is read of a file"
    is_found(report)


class Harmful:
    """A pickle of it calls ``os.mkdir``."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def test_a_pickle_with_a_call_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    made = tmp_path / "made"
    harmful = {**dump(1), "entries": [Harmful(made)]}
    files = pickled() | {"nccl_trace_rank_1": pickle.dumps(harmful)}
    report = examine([written(tmp_path / "job", files)])
    assert not made.exists()
    is_found(report)
    (refused,) = [one for one in report.files if one.problem]
    assert refused.path.endswith("nccl_trace_rank_1")
    assert refused.problem.startswith("refused: it asks for 'posix.mkdir'")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps(dump(1))[:100],
        pickle.dumps([1, 2]),
        pickle.dumps({**dump(1), "entries": 3}),
        pickle.dumps({**dump(1), "entries": [3, None, "x"]}),
        b"\x80\x02" + b"\xff" * 50,
        b'{"version": "2.10", "entries": [',
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "a list", "a number", "numbers", "noise", "cut JSON", "deep"],
)
def test_a_damaged_dump_is_named_and_the_rest_goes_on(
    data: bytes, tmp_path: Path
) -> None:
    files = pickled() | {"nccl_trace_rank_1": data}
    report = examine([written(tmp_path, files)])
    is_found(report)
    (damaged,) = [one for one in report.files if one.path.endswith("rank_1")]
    assert damaged.problem


def _endless() -> list[Any]:
    """Return a list that has 2 ** 60 numbers: to go through all of it never ends."""
    found: list[Any] = [1, 1]
    for _ in range(60):
        found = [found, found]
    return found


@pytest.mark.parametrize(
    "place",
    [
        *("version", "host", "desc", "counter", "name", "state"),
        *("profiling_name", "process_group", "input_sizes", "output_dtypes"),
    ],
)
def test_a_small_file_whose_content_is_endless_takes_no_time(
    place: str, tmp_path: Path
) -> None:
    content = dump(1)
    entry = content["entries"][0]
    if place == "desc":
        next(iter(content["pg_config"].values()))[place] = _endless()
    elif place == "counter":
        status = next(iter(content["pg_status"].values()))
        status["last_enqueued_collective"] = _endless()
    elif place == "name":
        entry["frames"][0]["name"] = _endless()
    elif place in entry:
        entry[place] = _endless()
    else:
        content[place] = _endless()
    files = pickled() | {"nccl_trace_rank_1": pickle.dumps(content, 2)}
    is_found(examine([written(tmp_path, files)]))


@pytest.mark.parametrize("number", ["9" * 5000, 10**5000], ids=["text", "number"])
def test_an_impossible_number_does_no_harm(number: str | int, tmp_path: Path) -> None:
    content = dump(1)
    content["pg_status"] = {number: {"last_enqueued_collective": "9" * 5000}}
    files = pickled() | {"nccl_trace_rank_1": pickle.dumps(content, 2)}
    is_found(examine([written(tmp_path, files)]))


@pytest.mark.parametrize("late_is_lost", [False, True])
def test_the_counters_of_a_dump_that_is_cut_off_tell_what_its_rank_has_issued(
    late_is_lost: bool, tmp_path: Path
) -> None:
    """Torch writes them before the entries."""
    files = pickled()
    whole = files["nccl_trace_rank_1"]
    if late_is_lost:
        del files[f"nccl_trace_rank_{LATE}"]
    counters = whole.index(b"entries") + 20
    for at in range(counters, len(whole) - 3, 50):
        report = examine([written(tmp_path, files | {"nccl_trace_rank_1": whole[:at]})])
        (verdict,) = report.verdicts
        assert verdict.culprits == (LATE,)
        assert 1 in verdict.waiting
        (cut,) = (one for one in report.files if one.path.endswith("rank_1"))
        assert cut.ranks == (1,)
        assert cut.problem.startswith("damaged: it is cut off")


def test_a_rank_whose_dump_is_cut_off_is_told_if_its_counters_lag(
    tmp_path: Path,
) -> None:
    files = pickled()
    late = f"nccl_trace_rank_{LATE}"
    files[late] = files[late][:-300]
    is_found(examine([written(tmp_path, files)]))


@pytest.mark.parametrize("lost", [300, 600])
def test_a_rank_with_ops_in_two_groups_is_not_blamed_where_its_dump_is_cut_off(
    lost: int, tmp_path: Path
) -> None:
    """Nothing tells in which of them it waits first."""
    groups = {"dp": (1, 2), "ep": (1, 2), "tp": (0, 1)}
    ranks = [
        Rank(rank, {name: its for name, its in groups.items() if rank in its})
        for rank in range(3)
    ]
    for name, its in groups.items():
        for rank in its:
            ranks[rank].issue(group=name)
    ranks[1].issue(group="tp", done=False)
    ranks[1].issue(group="dp", done=False)
    ranks[2].issue(group="ep", done=False)
    files = {f"rank_{one.rank}": pickle.dumps(one.dump(), 2) for one in ranks}
    (whole,) = examine([written(tmp_path, files)]).verdicts
    assert whole.culprits == (0,)
    files["rank_1"] = files["rank_1"][:-lost]
    verdicts = examine([written(tmp_path, files)]).verdicts
    assert not [one for one in verdicts if 1 in one.culprits]


def test_a_file_that_is_too_large_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = pickled()
    largest = max(map(len, files.values()))
    monkeypatch.setattr(module, "LARGEST", largest)
    files["nccl_trace_rank_1"] += b"\0" * 100
    report = examine([written(tmp_path, files)])
    is_found(report)
    (left_out,) = [one for one in report.files if one.problem]
    assert left_out.problem.startswith("left out: ")


def test_the_files_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    before = written(tmp_path / "attempt_0", pickled(ops=2))
    for path in before.iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    now = written(tmp_path / "attempt_1", pickled())
    for path in now.iterdir():
        os.utime(path, (1_700_009_000, 1_700_009_000))
    report = examine([tmp_path])
    (verdict,) = report.verdicts
    assert (verdict.culprits, verdict.seq) == ((LATE,), 3)
    assert sum(bool(one.problem) for one in report.files) == WORLD


@pytest.mark.parametrize(
    ("seconds", "culprits"),
    [
        # After the op that hung, when the empty dumps were written.
        pytest.param((600, 900), [], id="the newest attempt is healthy"),
        pytest.param((600, 300), [(LATE,)], id="the older attempt was"),
        pytest.param((86_400, 86_401), [], id="copies: nothing tells which is newer"),
    ],
)
def test_of_two_attempts_one_was_in_no_op(
    tmp_path: Path, seconds: tuple[int, int], culprits: list[tuple[int, ...]]
) -> None:
    """Torch leaves out what is over: nothing in such a dump tells its time."""
    ranks = []
    for rank in range(WORLD):
        ranks.append(Rank(rank, {"default_pg": range(WORLD)}))
        ranks[-1].issue_many(3)
        if rank != LATE:
            ranks[-1].issue(done=False)
    hung = write(tmp_path / "x", ranks, active_only=True)
    for one in ranks:
        one.entries = one.entries[:3]
    idle = write(tmp_path / "a", ranks[:3], active_only=True)
    for folder, after in zip((hung, idle), seconds, strict=True):
        for path in folder.iterdir():
            os.utime(path, ns=(START_NS + after * 10**9,) * 2)
    found = examine([tmp_path]).verdicts
    assert [one.culprits for one in found] == culprits


def test_a_dump_that_an_earlier_attempt_left_is_not_used(tmp_path: Path) -> None:
    """Nobody has written over it: the rank left none in the newest attempt."""
    files = pickled(ops=3)
    old = dump(1, 2)
    for entry in old["entries"]:
        for name in [one for one in entry if one.startswith("time_")]:
            entry[name] = entry[name] and entry[name] - 900 * 10**9
    files["nccl_trace_rank_1"] = pickle.dumps(old, 2)
    report = examine([written(tmp_path, files)])
    (left,) = [one for one in report.files if one.problem]
    assert (left.ranks, left.path[-1]) == ((1,), "1")
    assert "it is of an older attempt, and rank 1 left nothing" in left.problem
    is_found(report)


def test_that_nothing_tells_when_dumps_were_written(tmp_path: Path) -> None:
    folder = written(tmp_path, pickled())
    told = "nothing tells when the dumps were written: if the job still ran then"
    assert told in examine([folder]).as_text()
    for path in folder.iterdir():
        newest = max(one["time_created_ns"] for one in dump(0)["entries"])
        os.utime(path, ns=(newest + 600 * 10**9,) * 2)
    assert told not in examine([folder]).as_text()


def test_a_healthy_job_hangs_nowhere(tmp_path: Path) -> None:
    healthy = {**dump(LATE)}
    files = {f"nccl_trace_rank_{rank}": pickle.dumps(healthy) for rank in range(WORLD)}
    report = examine([written(tmp_path, files)])
    assert report.verdicts == ()
    assert report.as_text().startswith("nothing hangs, as far as what was read tells")


def test_entries_share_what_repeats_and_nothing_that_only_seems_equal() -> None:
    entries = [
        {
            "profiling_name": "nccl:all_reduce",
            "process_group": ("0", "default_pg"),
            "input_sizes": [[size]],
            "record_id": number,
        }
        for number, size in enumerate((1, 1, True, 1.0, 2))
    ]
    first, same, *others = read_entries(entries)
    assert first.kind is same.kind
    assert first.kind.arrays.inputs == ((1,),)
    # Neither a truth value nor a fraction is a size.
    assert [one.kind.arrays.inputs for one in others] == [None, None, ((2,),)]
    assert [one.record_id for one in (first, same)] == [0, 1]


def test_a_number_of_an_old_version_counts_both_kinds() -> None:
    entry = {
        "profiling_name": "nccl:all_reduce",
        "process_group": ["0"],
        "seq_id": 7,
    }
    (found,) = read_entries([entry])
    assert (found.collective_seq_id, found.pg_id) == (7, -1)
    assert found.kind.group == ("0", "")
