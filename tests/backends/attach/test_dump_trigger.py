"""Dumps on demand. Without NCCL a thread plays torch's; pipe and file are real."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankscope.backends.attach import dump_trigger, reports
from rankscope.backends.attach.dump_trigger import dump_reports
from rankscope.backends.attach.jobs import Job, Member
from rankscope.backends.attach.process_table import Process
from rankscope.backends.observe.evidence import combine
from rankscope.backends.observe.root_cause import find_root_causes
from tests.backends.attach.test_debug_server import dump

#: Returns how many ops a rank has issued when it writes its dump for the n-th time.
Ops = Callable[[int, int], int]


class Ranks:
    """The threads of torch of several ranks, which write when they are told to."""

    def __init__(self, folder: Path, size: int, ops: Ops) -> None:
        self.folder, self.size, self.ops = folder, size, ops
        self.written = [0] * size
        self._over = threading.Event()
        self._threads = []
        for rank in range(size):
            os.mkfifo(folder / f"ask_{rank}.pipe")
            # As torch: before anybody writes.
            pipe = os.open(folder / f"ask_{rank}.pipe", os.O_RDONLY | os.O_NONBLOCK)
            thread = threading.Thread(target=self._serve, args=(rank, pipe))
            thread.start()
            self._threads.append(thread)

    def _serve(self, rank: int, pipe: int) -> None:
        try:
            while not self._over.wait(0.01):
                try:
                    told = os.read(pipe, 128)
                except BlockingIOError:
                    continue
                if told:
                    self.written[rank] += 1
                    self._write(rank, dump(self.ops(rank, self.written[rank])))
        finally:
            os.close(pipe)

    def _write(self, rank: int, content: dict[str, object]) -> None:
        text = json.dumps(content)
        with (self.folder / f"trace_{rank}").open("w") as file:
            # Whoever looks now finds a part of it.
            for half in (text[: len(text) // 2], text[len(text) // 2 :]):
                file.write(half)
                file.flush()

    def job(self, members: int | None = None) -> Job:
        variables = {
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "ask_",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{self.folder}/trace_",
        }
        process = Process(os.getpid(), 1, user=os.getuid(), variables=variables)
        found = [Member(process, rank) for rank in range(members or self.size)]
        return Job("torchrun", "", None, self.size, tuple(found))

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)


@pytest.fixture
def serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Ops], Ranks]]:
    monkeypatch.setattr(reports, "BETWEEN", 0.0)
    monkeypatch.chdir(tmp_path)  # a pipe's path may be relative to that of its process
    started: list[Ranks] = []

    def start(ops: Ops) -> Ranks:
        started.append(Ranks(tmp_path, 2, ops))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_the_rank_that_has_not_entered_is_named(
    serve: Callable[[Ops], Ranks], tmp_path: Path
) -> None:
    (tmp_path / "trace_0").write_text(json.dumps(dump(1)))  # of an earlier hang
    ranks = serve(lambda rank, time: 2 - rank)
    asked = dump_reports(ranks.job())
    assert asked is not None
    found, file = asked.compare()
    assert (file.problem, file.ranks) == ("", (0, 1))
    (verdict,) = find_root_causes(combine(found.ranks, 2, found.groups))
    assert verdict.culprits == (1,)
    assert ranks.written == [2, 2]


def test_a_job_that_goes_on_is_told_as_one(serve: Callable[[Ops], Ranks]) -> None:
    asked = dump_reports(serve(lambda rank, time: time).job())
    assert asked is not None
    found, file = asked.compare()
    assert "the job goes on" in file.problem
    assert not found.ranks


def test_a_rank_that_does_not_write_blames_nobody(
    serve: Callable[[Ops], Ranks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dump_trigger, "PATIENCE", 0.5)
    ranks = serve(lambda rank, time: 1)
    write = ranks._write
    monkeypatch.setattr(
        ranks, "_write", lambda rank, content: rank or write(rank, content)
    )
    asked = dump_reports(ranks.job())
    assert asked is not None
    found, file = asked.compare()
    assert file.problem == "rank 1 wrote no dump in 0.5 s"
    assert not found.ranks


def test_ranks_of_other_hosts_are_asked_for(serve: Callable[[Ops], Ranks]) -> None:
    ranks = serve(lambda rank, time: 1)
    asked = dump_reports(ranks.job(members=1))
    assert asked is not None
    assert "rank 1 is on another host" in asked.compare()[1].problem
    assert ranks.written == [0, 0]


def test_what_is_no_pipe_of_the_rank_gets_nothing(
    serve: Callable[[Ops], Ranks], tmp_path: Path
) -> None:
    ranks = serve(lambda rank, time: 1)
    (tmp_path / "ask_1.pipe").unlink()
    assert dump_reports(ranks.job()) is None
    (tmp_path / "ask_1.pipe").write_text("a file")
    assert dump_reports(ranks.job()) is None
    assert (tmp_path / "ask_1.pipe").read_text() == "a file"


def test_a_pipe_that_nobody_reads_is_told(
    serve: Callable[[Ops], Ranks], tmp_path: Path
) -> None:
    ranks = serve(lambda rank, time: 1)
    ranks.close()
    asked = dump_reports(ranks.job())
    assert asked is not None
    assert "rank 0 does not take the request" in asked.compare()[1].problem
