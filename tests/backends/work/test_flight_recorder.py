"""The flight recorder's ring: every record of every thread, in order."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.observe.evidence import SourceLine
from rankscope.backends.work.flight_recorder import (
    FlightRecorder,
    GroupCounters,
    Record,
    issued_by,
    recorder,
    user_frame,
)
from rankscope.backends.work.op_type import OpType


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let the interpreter switch threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def record(group: str) -> Record:
    status = GroupCounters(group, 0, 0, range(2))
    return Record(status, OpType.BARRIER, (), None, 60.0)


def test_the_frame_is_the_innermost_one_outside_of_the_package() -> None:
    """However deep in the package the record is made."""
    inside: dict[str, Any] = {
        "__name__": "rankscope.backends.some",
        "user_frame": user_frame,
    }
    exec("def call(n):\n    return call(n - 1) if n else user_frame()", inside)
    for depth in range(6):
        file, line, function = inside["call"](depth)
        assert (file, function) == (__file__, sys._getframe().f_code.co_name)
        assert line == sys._getframe().f_lineno - 2
    # A module whose name only begins like the package's is the user's.
    other: dict[str, Any] = {"__name__": "rankscope_demo", "user_frame": user_frame}
    exec("def mine():\n    return user_frame()", other)
    assert other["mine"]()[2] == "mine"


def test_an_op_that_a_library_issues_names_it_beside_the_line() -> None:
    with issued_by("DistributedDataParallel.backward"):
        made = record("default")
    line = f"{made.frames[0][1]} in DistributedDataParallel.backward"
    for text in (
        made.describe(),
        made.brief()["source"],
        made.as_dict()["frame"]["source"],
    ):
        assert line in text
    assert " in " not in record("default").brief()["source"]
    source = SourceLine.of(made.brief()["source"])
    assert source is not None
    assert (source.line, source.issuer) == (
        made.frames[0][1],
        "DistributedDataParallel.backward",
    )
    assert str(source) == made.brief()["source"]
    cell = "cell 7 line 3 in fp16_compress_hook"
    assert str(SourceLine.of(cell)) == cell


@pytest.mark.usefixtures("frequent_switches")
def test_no_record_is_lost_where_groups_issue_from_threads_of_their_own() -> None:
    threads, each = 4, 20_000
    kept = FlightRecorder(threads * each)
    ready = threading.Barrier(threads)

    def issue(group: str) -> None:
        mine = record(group)
        made = [object.__new__(Record) for _ in range(each)]
        for one in made:
            one.status = mine.status
        ready.wait()
        for one in made:
            kept.add(one)

    workers = [
        threading.Thread(target=issue, args=(f"group {i}",)) for i in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert kept.count == threads * each
    numbers = [one.record_id for one in kept.records()]
    assert numbers == list(range(threads * each))


def test_a_group_that_is_made_anew_has_records_of_its_own() -> None:
    """Else its first ops would be compared with the last ones of other ranks."""
    recorder.clear()
    for _ in range(3):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.barrier()
        finally:
            dist.destroy_process_group()
    ops = [(one["generation"], one["collective_seq_id"]) for one in recorder.dump()]
    first, second, third = ops
    assert third == (0, 1)
    assert first[0] < second[0] < 0


def test_the_oldest_records_fall_out() -> None:
    kept = FlightRecorder(4)
    for number in range(6):
        assert [one.record_id for one in kept.records()] == [
            *range(max(0, number - 4), number)
        ]
        kept.add(record("default"))
    assert kept.count == 6
    kept.clear()
    assert (kept.count, kept.records()) == (0, [])


def test_a_record_keeps_no_array() -> None:
    array = np.ones(3)
    references = sys.getrefcount(array)
    status = GroupCounters("default", 0, 0, range(2))
    made = Record(status, OpType.ALL_REDUCE, (array,), None, 60.0)
    assert sys.getrefcount(array) == references
    assert made.sizes == [(3,)]


class TestMessages:
    """Which send or receive each is, with its peer and tag: who takes which."""

    @pytest.fixture
    def ring(self) -> FlightRecorder:
        return FlightRecorder(100)

    def issue(
        self, ring: FlightRecorder, status: GroupCounters, *ops: Any, backend: str = ""
    ) -> list[Record]:
        found = []
        for op, peer, tag in ops:
            one = Record(status, op, (), peer, 60.0, backend, tag=tag)
            one.number()
            ring.add(one)
            found.append(one)
        return found

    def test_each_is_counted_with_its_peer_and_tag(self, ring: FlightRecorder) -> None:
        status, send, recv = GroupCounters("g", 0, 0, range(3)), *_P2P
        ops = [(send, 1, 0), (send, 2, 0), (send, 1, 7), (recv, 1, 0), (send, 1, 0)]
        found = self.issue(ring, status, *ops)
        assert [one.message for one in found] == [1, 1, 1, 1, 2]
        assert [one.as_dict()["message"] for one in found] == [1, 1, 1, 1, 2]
        (other,) = self.issue(ring, status, (OpType.BARRIER, None, None))
        assert other.message is None

    def test_nccl_has_no_tags(self, ring: FlightRecorder) -> None:
        status, send, _ = GroupCounters("g", 0, 0, range(2)), *_P2P
        ops = [(send, 1, 0), (send, 1, 7)]
        found = self.issue(ring, status, *ops, backend="nccl")
        assert [one.message for one in found] == [1, 2]

    def test_after_one_from_any_rank_it_is_not_known(
        self, ring: FlightRecorder
    ) -> None:
        status, send, recv = GroupCounters("g", 0, 0, range(3)), *_P2P
        before, any_rank, after, other_tag, sent = self.issue(
            ring,
            status,
            *[(recv, 1, 0), (recv, None, 0), (recv, 1, 0), (recv, 1, 7), (send, 1, 0)],
        )
        assert (before.message, any_rank.message, after.message) == (1, 0, 0)
        assert (other_tag.message, sent.message) == (1, 1)

    def test_one_that_was_refused_does_not_count(self, ring: FlightRecorder) -> None:
        status, send, recv = GroupCounters("g", 0, 0, range(2)), *_P2P
        for op, peer in ((send, 1), (recv, 1), (recv, None)):
            (refused,) = self.issue(ring, status, (op, peer, 0))
            ring.withdraw(refused)
        found = self.issue(ring, status, (send, 1, 0), (recv, 1, 0))
        assert [one.message for one in found] == [1, 1]


_P2P = OpType.SEND, OpType.RECV
